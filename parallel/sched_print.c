// sched_print - text without libc: a small printf, texts that grow in an arena, failures.
#include "parallel/sched_inner.h"

#include <string.h>

// ---- numbers ---------------------------------------------------------------------------------

enum { DIGITS_MAX = 24 };

// Writes the decimal digits of n, at most 20, before `end`; returns where they begin.
static char *decimal(uint64_t n, char *end) {
  char *at = end;
  do *--at = (char)('0' + n % 10);
  while ((n /= 10) > 0);
  return at;
}

// Appends n digits of `number`, whose last `decimals` stand behind a point; trailing zeros there
// are dropped. Returns the length.
static int put_scaled(char *to, uint64_t number, int decimals) {
  char digits[DIGITS_MAX], *end = digits + DIGITS_MAX;
  while (decimals > 0 && number % 10 == 0) {
    number /= 10;
    decimals--;
  }
  char *at = decimal(number, end);
  int count = (int)(end - at), length = 0;
  if (count <= decimals) to[length++] = '0';
  for (int i = 0; i < count - decimals; i++) to[length++] = at[i];
  if (decimals > 0) {
    to[length++] = '.';
    for (int i = count; i < decimals; i++) to[length++] = '0';
    for (int i = count > decimals ? count - decimals : 0; i < count; i++) to[length++] = at[i];
  }
  return length;
}

static double power_of_ten(int n) {
  double x = 1;
  for (; n > 0; n--) x *= 10;
  return x;
}

enum { SIGNIFICANT = 12, NUMBER_MAX = 48 };

// A real number: `decimals` behind the point, or, if that is negative, 12 significant digits.
static int put_real(char *to, double x, int decimals) {
  int length = 0;
  if (x != x) {
    memcpy(to, "nan", 3);
    return 3;
  }
  if (x < 0) {
    to[length++] = '-';
    x = -x;
  }
  if (x > 1.7e308) {
    memcpy(to + length, "inf", 3);
    return length + 3;
  }
  int exponent = 0; // of ten, where the number is too large or too small to be written plainly
  if (x > 0 && decimals < 0) {
    if (x >= 1e15)
      while (x >= 10) x /= 10, exponent++;
    if (x < 1e-5)
      while (x < 1) x *= 10, exponent--;
  }
  if (decimals < 0) {
    decimals = SIGNIFICANT;
    for (uint64_t whole = (uint64_t)x; whole > 0 && decimals > 0; whole /= 10) decimals--;
    if (x > 0 && x < 1) // zeros behind the point are not significant
      while (x * power_of_ten(decimals - SIGNIFICANT + 1) < 1) decimals++;
  }
  while (decimals > 0 && x * power_of_ten(decimals) >= 9e18) decimals--;
  length += put_scaled(to + length, (uint64_t)(x * power_of_ten(decimals) + 0.5), decimals);
  if (exponent != 0) {
    char digits[DIGITS_MAX], *end = digits + DIGITS_MAX;
    to[length++] = 'e';
    if (exponent < 0) to[length++] = '-';
    char *at = decimal((uint64_t)(exponent < 0 ? -exponent : exponent), end);
    memcpy(to + length, at, (size_t)(end - at));
    length += (int)(end - at);
  }
  return length;
}

// ---- printf ----------------------------------------------------------------------------------

static void put_padded(const SchedOut *out, const char *bytes, size_t count, int width,
                       bool is_left) {
  static const char spaces[] = "                                ";
  int missing = width - (int)count;
  if (is_left) out->write(out->user, bytes, count);
  for (; missing > 0; missing -= 32)
    out->write(out->user, spaces, missing < 32 ? (size_t)missing : 32);
  if (!is_left) out->write(out->user, bytes, count);
}

// One conversion, after its `%`. Returns the format behind it.
static const char *put_conversion(const SchedOut *out, const char *format, va_list *args) {
  int width = 0, decimals = -1;
  bool is_left = *format == '-';
  if (is_left) format++;
  if (*format == '*') {
    width = va_arg(*args, int);
    format++;
  }
  while (*format >= '0' && *format <= '9') width = 10 * width + (*format++ - '0');
  if (*format == '.' && format[1] == '*') {
    decimals = va_arg(*args, int);
    format += 2;
  } else if (*format == '.') {
    decimals = 0;
    while (*++format >= '0' && *format <= '9') decimals = 10 * decimals + (*format - '0');
  }
  bool is_long = format[0] == 'l' && format[1] == 'l';
  if (is_long) format += 2;

  char text[NUMBER_MAX], *begin = text;
  size_t count = 0;
  switch (*format) {
  case 'd': {
    long long n = is_long ? va_arg(*args, long long) : va_arg(*args, int);
    char digits[DIGITS_MAX], *end = digits + DIGITS_MAX;
    begin = decimal(n < 0 ? (uint64_t)0 - (uint64_t)n : (uint64_t)n, end);
    count = (size_t)(end - begin);
    memmove(text + 1, begin, count);
    text[0] = '-';
    begin = n < 0 ? text : text + 1;
    count += n < 0;
    break;
  }
  case 'g': count = (size_t)put_real(text, va_arg(*args, double), decimals); break;
  case 'c':
    text[0] = (char)va_arg(*args, int);
    count = 1;
    break;
  case 's': {
    const char *words = va_arg(*args, const char *);
    while ((decimals < 0 || count < (size_t)decimals) && words[count]) count++;
    put_padded(out, words, count, width, is_left);
    return format + 1;
  }
  case '%':
    text[0] = '%';
    count = 1;
    break;
  }
  put_padded(out, begin, count, width, is_left);
  return format + 1;
}

static void print_list(const SchedOut *out, const char *format, va_list *args) {
  while (*format) {
    const char *end = format;
    while (*end && *end != '%') end++;
    if (end > format) out->write(out->user, format, (size_t)(end - format));
    format = *end ? put_conversion(out, end + 1, args) : end;
  }
}

void sched_print(const SchedOut *out, const char *format, ...) {
  va_list args;
  va_start(args, format);
  print_list(out, format, &args);
  va_end(args);
}

// ---- where text goes -------------------------------------------------------------------------

// A buffer of fixed size; what does not fit is cut.
typedef struct Fixed {
  char *at;
  size_t left;
} Fixed;

static void write_fixed(void *user, const char *bytes, size_t count) {
  Fixed *fixed = user;
  if (count > fixed->left) count = fixed->left;
  memcpy(fixed->at, bytes, count);
  fixed->at += count;
  fixed->left -= count;
}

void sched_vformat(char *buffer, size_t size, const char *format, va_list *args) {
  Fixed fixed = {buffer, size - 1};
  SchedOut out = {write_fixed, &fixed};
  print_list(&out, format, args);
  *fixed.at = 0;
}

void sched_format(char *buffer, size_t size, const char *format, ...) {
  va_list args;
  va_start(args, format);
  sched_vformat(buffer, size, format, &args);
  va_end(args);
}

Status sched_fail(SchedArena *arena, Status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  sched_vformat(arena->message, sizeof arena->message, format, &args);
  va_end(args);
  return status;
}

SchedName sched_name(Action action) {
  SchedName name = {""};
  Fixed fixed = {name.text, sizeof name.text - 1};
  SchedOut out = {write_fixed, &fixed};
  sched_print_action(&out, action);
  *fixed.at = 0;
  return name;
}

static void write_text(void *user, const char *bytes, size_t count) {
  SchedText *text = user;
  if (text->is_full) return;
  if (count >= text->room - text->length) {
    size_t room = 2 * (text->length + count) + 256;
    char *grown = sched_alloc(text->arena, room, 1);
    if (!grown) {
      text->is_full = true;
      return;
    }
    if (text->length > 0) memcpy(grown, text->text, text->length);
    text->text = grown;
    text->room = room;
  }
  memcpy(text->text + text->length, bytes, count);
  text->length += count;
  text->text[text->length] = 0;
}

SchedOut sched_text_out(SchedText *text) { return (SchedOut){write_text, text}; }
