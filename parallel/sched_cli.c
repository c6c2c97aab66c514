// sched_cli - `rille schedule`: draw, check and simulate a schedule from the command line.
#include "parallel/sched_cli.h"

#include "parallel/sched_inner.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

// ---- options ---------------------------------------------------------------------------------

typedef enum Format { AS_TEXT, AS_CSV, AS_JSON, AS_SVG, AS_HTML, AS_TRACE, FORMATS } Format;
static const char *const format_names[FORMATS] = {"text", "csv", "json", "svg", "html", "trace"};

typedef struct Options {
  const char *name;
  int p, v, m, group; // 0: not given
  double F, I, W, overlap, hop;
  Format format;
  bool explain, list, help, compare;
  SchedLoad load; // for scripts
  void *load_user;
} Options;

// X(option, value, help)
#define OPTION_LIST(X)                                                                         \
  X("-p", "P", "ranks of the pipeline, from 1")                                                \
  X("-v", "V", "stages a rank; what each schedule allows: --list")                             \
  X("-m", "M", "microbatches, from 1")                                                         \
  X("--group", "N", "interleaved: microbatches of a group (default: balanced)")                \
  X("--costs", "F,I,W", "times of forward, dgrad and wgrad of a rank's share (default 1,1,1)") \
  X("--overlap", "X", "dualpipev: time of an overlapped pair (default: F, and then B)")        \
  X("--hop", "C", "latency of a message (default 0)")                                          \
  X("--format", "FORMAT", "text (default), csv, json, svg, html or trace (Chrome's)")          \
  X("--explain", NULL, "say the critical path in words")                                       \
  X("--compare", NULL, "all schedules side by side, in place of NAME (--costs, --overlap)")    \
  X("--list", NULL, "say what schedules there are")                                            \
  X("--help", NULL, "this text")

static const struct {
  const char *name, *value, *help;
} option_table[] = {
#define X(name, value, help) {name, value, help},
    OPTION_LIST(X)
#undef X
};
enum { OPTIONS = sizeof option_table / sizeof *option_table };

static int usage(FILE *err, const char *format, ...) PRINTF_LIKE(2, 3);
static int usage(FILE *err, const char *format, ...) {
  va_list args;
  va_start(args, format);
  fputs("rille schedule: ", err);
  vfprintf(err, format, args);
  fputs("\n", err);
  va_end(args);
  return 2;
}

static void print_help(FILE *out) {
  fputs("rille schedule NAME -p P [-v V] -m M [options]: draw, check and simulate a pipeline\n"
        "schedule. NAME is one of --list; a script x.lua that returns a rille.schedule{...}; or a "
        "CSV\n"
        "file with a row a rank (then no -p, -v, -m).\n\n",
        out);
  for (int i = 0; i < OPTIONS; i++) {
    char left[32];
    snprintf(left, sizeof left, "%s %s", option_table[i].name,
             option_table[i].value ? option_table[i].value : "");
    fprintf(out, "  %-18s %s\n", left, option_table[i].help);
  }
}

static void print_list(FILE *out) {
  int count;
  const SchedType *type = sched_types(&count);
  fprintf(out, "%-13s %-17s %-12s %s\n", "schedule", "torch's name", "stages/rank", "");
  for (int i = 0; i < count; i++, type++) {
    char chunks[32];
    if (type->chunks_min == type->chunks_max)
      snprintf(chunks, sizeof chunks, "%d", type->chunks_min);
    else
      snprintf(chunks, sizeof chunks, "%d, %d, %d ..", type->chunks_min,
               type->chunks_min + type->chunks_step, type->chunks_min + 2 * type->chunks_step);
    fprintf(out, "%-13s %-17s %-12s %s\n", type->name, *type->alias ? type->alias : "-", chunks,
            type->help);
  }
}

// Wrong usage: an unknown word. near: the name that was meant, NULL if none is known.
static int usage_near(FILE *err, const char *what, const char *word, const char *near,
                      const char *otherwise) {
  if (!near) return usage(err, "unknown %s %s: %s", what, word, otherwise);
  return usage(err, "unknown %s %s; did you mean %s? (%s)", what, word, near, otherwise);
}

// NULL: none is near.
static const char *nearest_option(const char *word) {
  const char *best = NULL;
  for (int i = 0, most = sched_near(word); i < OPTIONS; i++) {
    int distance = sched_distance(word, option_table[i].name);
    if (distance > most) continue;
    best = option_table[i].name;
    most = distance - 1;
  }
  return best;
}

// Drawing and simulating take about 3 us and 0.5 KB for each forward of a microbatch on a stage.
enum { NUMBER_MAX = 1 << 20, CELLS_MAX = 1 << 20 };

static int parse_int(FILE *err, const char *option, const char *text, int *value) {
  char *end;
  errno = 0;
  long number = strtol(text, &end, 10);
  if (errno || *end || end == text || number < 1 || number > NUMBER_MAX)
    return usage(err, "%s %s: expected a whole number from 1 to %d", option, text, NUMBER_MAX);
  *value = (int)number;
  return 0;
}

// A time: finite, not negative. Returns what follows, or NULL.
static const char *parse_time(const char *text, double *value) {
  char *end;
  *value = strtod(text, &end);
  return end != text && *value >= 0 && *value < 1e300 ? end : NULL;
}

static int parse_costs(FILE *err, const char *text, Options *options) {
  const char *at = parse_time(text, &options->F);
  if (at && *at == ',')
    at = parse_time(at + 1, &options->I);
  else
    at = NULL;
  if (at && *at == ',')
    at = parse_time(at + 1, &options->W);
  else
    at = NULL;
  if (!at || *at || !(options->F + options->I + options->W > 0))
    return usage(err, "--costs %s: expected three times F,I,W from 0 on, like 1,1,1 or 1,1.2,0.8",
                 text);
  return 0;
}

static int parse_format(FILE *err, const char *text, Format *format) {
  for (int i = 0; i < FORMATS; i++) {
    if (strcmp(text, format_names[i]) != 0) continue;
    *format = (Format)i;
    return 0;
  }
  return usage(err, "--format %s: expected text, csv, json, svg, html or trace", text);
}

static int parse_value(FILE *err, const char *option, const char *text, Options *options) {
  double *time = strcmp(option, "--hop") == 0 ? &options->hop : &options->overlap;
  if (strcmp(option, "-p") == 0) return parse_int(err, option, text, &options->p);
  if (strcmp(option, "-v") == 0) return parse_int(err, option, text, &options->v);
  if (strcmp(option, "-m") == 0) return parse_int(err, option, text, &options->m);
  if (strcmp(option, "--group") == 0) return parse_int(err, option, text, &options->group);
  if (strcmp(option, "--costs") == 0) return parse_costs(err, text, options);
  if (strcmp(option, "--format") == 0) return parse_format(err, text, &options->format);
  const char *end = parse_time(text, time);
  if (!end || *end) return usage(err, "%s %s: expected a time from 0 on", option, text);
  return 0;
}

// Reads `--name value` and `--name=value`. Returns 0, or the exit code.
static int parse(int argc, char **argv, FILE *err, Options *options) {
  for (int i = 1; i < argc; i++) {
    const char *word = argv[i], *value = strchr(word, '=');
    size_t length = value ? (size_t)(value - word) : strlen(word);
    if (word[0] != '-') {
      if (options->name)
        return usage(err, "one schedule at a time: %s, and then %s", options->name, word);
      options->name = word;
      continue;
    }
    int known = 0;
    while (known < OPTIONS && (strlen(option_table[known].name) != length ||
                               strncmp(option_table[known].name, word, length) != 0))
      known++;
    if (known == OPTIONS)
      return usage_near(err, "option", word, nearest_option(word), "--help names them");
    if (!option_table[known].value) {
      if (value) return usage(err, "%s takes no value", option_table[known].name);
      options->explain = options->explain || strcmp(option_table[known].name, "--explain") == 0;
      options->compare = options->compare || strcmp(option_table[known].name, "--compare") == 0;
      options->list = options->list || strcmp(option_table[known].name, "--list") == 0;
      options->help = options->help || strcmp(option_table[known].name, "--help") == 0;
      continue;
    }
    if (value)
      value++;
    else if (i + 1 < argc)
      value = argv[++i];
    else
      return usage(err, "%s needs a value: %s %s, %s", word, word, option_table[known].value,
                   option_table[known].help);
    int code = parse_value(err, option_table[known].name, value, options);
    if (code) return code;
  }
  return 0;
}

// ---- the schedule ----------------------------------------------------------------------------

static bool is_file(const char *name, const char *end) {
  size_t length = strlen(name), n = strlen(end);
  return length > n && strcmp(name + length - n, end) == 0;
}

static int read_file(SchedArena *arena, const Options *options, FILE *err, Sched **out) {
  if (options->p || options->v || options->m || options->group)
    return usage(err, "%s: sizes come from the file: no -p, -v, -m or --group", options->name);
  FILE *file = fopen(options->name, "rb");
  if (!file) return usage(err, "%s: %s", options->name, strerror(errno));
  SchedText text = {.arena = arena};
  SchedOut into = sched_text_out(&text);
  char block[4096];
  for (size_t n; (n = fread(block, 1, sizeof block, file)) > 0;) into.write(into.user, block, n);
  bool failed = ferror(file) || text.is_full;
  fclose(file);
  if (failed)
    fprintf(err, "rille schedule: %s: cannot be read\n", options->name);
  else if (sched_parse_csv(arena, out, options->name, text.text ? text.text : "", text.length) ==
           ST_OK)
    return 0;
  else
    fprintf(err, "rille schedule: %s: %s\n", options->name, arena->message);
  return 1;
}

// Sizes that would take minutes and gigabytes are refused before anything is made.
static int check_size(FILE *err, const Options *options, const SchedType *type) {
  int64_t chunks = options->v ? options->v : type ? type->chunks_min : 1;
  int64_t stages = options->p * chunks;
  if (stages * options->m <= CELLS_MAX) return 0;
  int64_t most = CELLS_MAX / stages;
  if (most < 1)
    return usage(err, "-p %d with %lld stages each is too large: p times v may be up to %d",
                 options->p, (long long)chunks, CELLS_MAX);
  return usage(err,
               "-m %d on %lld stages is too large: p times v times m may be up to %d, here -m %lld",
               options->m, (long long)stages, CELLS_MAX, (long long)most);
}

static int make_schedule(SchedArena *arena, const Options *options, FILE *err, Sched **out) {
  if (!options->name) return usage(err, "which schedule? rille schedule --list says what there is");
  if (is_file(options->name, ".csv")) return read_file(arena, options, err, out);
  bool is_script = options->load && is_file(options->name, ".lua");
  const SchedType *type = sched_find(options->name);
  if (!type && !is_script)
    return usage_near(err, "schedule", options->name, sched_nearest(options->name),
                      "--list says what there is; a file's name ends in .csv or .lua");
  if (!options->p) return usage(err, "-p is missing: -p P, ranks of the pipeline, from 1");
  if (!options->m) return usage(err, "-m is missing: -m M, microbatches, from 1");
  int too_large = check_size(err, options, type);
  if (too_large) return too_large;
  SchedCase sizes = {
      .ranks = options->p, .chunks = options->v, .mbs = options->m, .group = options->group};
  if (is_script) return options->load(options->load_user, options->name, &sizes, out, err);
  Status status = sched_generate(arena, out, type, &sizes);
  if (status == ST_OK) return 0;
  fprintf(err, "rille schedule: %s\n", arena->message);
  return status == ST_EVALUE ? 2 : 1;
}

// ---- text ------------------------------------------------------------------------------------

static int width_of(FILE *out) {
  struct winsize size;
  const char *columns = getenv("COLUMNS");
  if (isatty(fileno(out)) && ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    return size.ws_col;
  return columns && atoi(columns) > 0 ? atoi(columns) : 120;
}

static SchedTerminal terminal_of(FILE *out) {
  SchedTerminal terminal = {.width = width_of(out), .colour = SCHED_COLOUR_NONE};
  const char *name = getenv("TERM"), *depth = getenv("COLORTERM"), *none = getenv("NO_COLOR");
  if (!isatty(fileno(out)) || (none && *none) || !name || strcmp(name, "dumb") == 0)
    return terminal;
  bool is_true = depth && (strcmp(depth, "truecolor") == 0 || strcmp(depth, "24bit") == 0);
  terminal.colour = is_true ? SCHED_COLOUR_TRUE : SCHED_COLOUR_256;
  return terminal;
}

static void print_bubble(const SchedOut *out, const char *name, double bubble, double makespan,
                         bool (*formula)(const SchedCase *, double *), const SchedCase *c) {
  double expected;
  double share = makespan > bubble ? 100 * bubble / (makespan - bubble) : 0;
  sched_print(out, "%-19s %g, %.1g%% over ideal", name, bubble, share);
  if (formula && formula(c, &expected)) sched_print(out, "; by formula %g", expected);
  sched_print(out, "\n");
}

static void print_figures(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                          const SchedCosts *costs, const SchedReport *report) {
  SchedCase c = sched_case(sched, costs);
  bool holds = sched_has_formula(sched, costs);
  sched_print(out, "makespan            %g (one step)\n", sim->makespan);
  print_bubble(out, "makespan bubble", sim->makespan_bubble, sim->makespan,
               holds ? sched->type->makespan : NULL, &c);
  print_bubble(out, "span bubble", sim->span_bubble,
               sim->makespan - sim->makespan_bubble + sim->span_bubble,
               holds ? sched->type->span : NULL, &c);
  sched_print(out, "peak activations    ");
  for (int rank = 0; rank < sched->ranks; rank++)
    sched_print(out, "%g ", (double)sim->peak[rank] / sched->chunks);
  sched_print(out, "(microbatches of a whole rank, rank 0 first)\n");
  int least = 0, most = 0;
  for (int i = 0; i < report->depths; i++) {
    int depth = report->depth[i].depth;
    if (i == 0 || depth < least) least = depth;
    if (depth > most) most = depth;
  }
  if (report->depths > 0)
    sched_print(out, "posted receives     %d to %d a channel (for messages that come early)\n",
                least, most);
  if (*sched->warning) sched_print(out, "warning             %s\n", sched->warning);
}

static void write_file(void *user, const char *bytes, size_t count) {
  fwrite(bytes, 1, count, user);
}

// Everything that is known of a valid schedule, in the format asked for.
static Status show(SchedArena *arena, const Options *options, const Sched *sched, FILE *file) {
  SchedOut out = {write_file, file};
  SchedCosts costs = sched_costs(options->F, options->I, options->W);
  costs.overlap = options->overlap;
  costs.hop = options->hop;
  SchedSim *sim;
  SchedReport *report;
  Sched *own;
  const Sched *lowered = sched; // as it is, if the messages are in the lists already
  TRY(sched_simulate(arena, &sim, sched, &costs));
  if (!sched->lowered) {
    TRY(sched_lower(arena, &own, sched, &costs));
    lowered = own;
  }
  TRY(sched_check(arena, &report, lowered));
  if (report->broken) return sched_fail(arena, ST_EVALUE, "%s", report->message);
  SchedTerminal terminal = terminal_of(file);
  switch (options->format) {
  case AS_TEXT:
    sched_print(&out, "%s: %d rank%s, %d stage%s each, %d microbatch%s; F=%g I=%g W=%g\n\n",
                sched->name, sched->ranks, sched->ranks == 1 ? "" : "s", sched->chunks,
                sched->chunks == 1 ? "" : "s", sched->mbs, sched->mbs == 1 ? "" : "es", costs.F,
                costs.I, costs.W);
    sched_draw_terminal(&out, sched, sim, &terminal);
    sched_print(&out, "\n");
    print_figures(&out, sched, sim, &costs, report);
    sched_print_report(&out, lowered, report, terminal.width);
    break;
  case AS_CSV: sched_print_csv(&out, sched); break;
  case AS_JSON: sched_print_json(&out, sched, sim, &costs, report); break;
  case AS_SVG: sched_draw_svg(&out, sched, sim, &costs); break;
  case AS_HTML: sched_draw_html(&out, sched, sim, &costs); break;
  case AS_TRACE: sched_draw_trace(&out, sched, sim, 1000); break;
  case FORMATS: break;
  }
  if (!options->explain) return ST_OK;
  SchedLink *path;
  int count;
  TRY(sched_critical_path(arena, &path, &count, sched, sim));
  sched_print(&out, "\n");
  sched_print_path(&out, sched, sim, path, count);
  return ST_OK;
}

static int compare(SchedArena *arena, const Options *options, FILE *out, FILE *err) {
  if (options->name || options->v || options->group || options->hop > 0 ||
      options->format != AS_TEXT || options->explain)
    return usage(err, "--compare takes -p, -m, --costs and --overlap alone");
  if (!options->p) return usage(err, "-p is missing: -p P, ranks of the pipeline, from 1");
  if (!options->m) return usage(err, "-m is missing: -m M, microbatches, from 1");
  SchedCase c = {.ranks = options->p,
                 .mbs = options->m,
                 .F = options->F,
                 .I = options->I,
                 .W = options->W,
                 .overlap = options->overlap};
  SchedOut to = {write_file, out};
  if (sched_print_table(arena, &to, &c) == ST_OK && fflush(out) == 0 && !ferror(out)) return 0;
  fprintf(err, "rille schedule: %s\n",
          *arena->message ? arena->message : "the output cannot be written");
  return 1;
}

static int run(SchedArena *arena, const Options *options, FILE *out, FILE *err) {
  Sched *sched = NULL;
  int code = make_schedule(arena, options, err, &sched);
  if (code || !sched) return code;
  SchedReport *report;
  SchedOut to_err = {write_file, err};
  Status status = sched_check(arena, &report, sched);
  if (status == ST_OK && report->broken) {
    sched_print_report(&to_err, sched, report, width_of(err));
    if (*sched->warning) fprintf(err, "    hint: --group: %s\n", sched->warning);
    return 1;
  }
  if (status == ST_OK && *sched->warning && options->format != AS_TEXT)
    fprintf(err, "rille schedule: warning: %s\n", sched->warning);
  if (status == ST_OK) status = show(arena, options, sched, out);
  if (status == ST_OK) status = fflush(out) || ferror(out) ? ST_EIO : ST_OK;
  if (status == ST_OK) return 0;
  fprintf(err, "rille schedule: %s\n",
          status == ST_EIO ? "the output cannot be written" : arena->message);
  return 1;
}

int sched_main(int argc, char **argv, FILE *out, FILE *err, SchedLoad load, void *user) {
  Options options = {.F = 1, .I = 1, .W = 1, .overlap = -1, .load = load, .load_user = user};
  int code = parse(argc, argv, err, &options);
  if (code) return code;
  if (options.help || options.list) {
    if (options.help)
      print_help(out);
    else
      print_list(out);
    return 0;
  }
  if (options.explain && options.format != AS_TEXT)
    return usage(err, "--explain goes with --format text");
  SchedArena arena;
  sched_heap_open(&arena);
  code = options.compare ? compare(&arena, &options, out, err) : run(&arena, &options, out, err);
  sched_heap_close(&arena);
  return code;
}
