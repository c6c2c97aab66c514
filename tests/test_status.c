// test_status - the error record.
#include "core/status.h"
#include "tests/tests.h"

#include <pthread.h>
#include <string.h>

START_TEST(fail_keeps_words_and_returns_status) {
  ck_assert_int_eq(fail(ST_ESHAPE, "%d and %s", 3, "four"), ST_ESHAPE);
  ck_assert_str_eq(status_message(), "3 and four");
  ck_assert_str_eq(status_hint(), "");
}
END_TEST

START_TEST(context_comes_in_front) {
  fail(ST_EIO, "no such file");
  ck_assert_int_eq(fail_context(ST_EIO, "loading %s", "a.bin"), ST_EIO);
  ck_assert_str_eq(status_message(), "loading a.bin: no such file");
}
END_TEST

START_TEST(a_message_may_quote_the_one_before) {
  fail(ST_EIO, "first");
  fail(ST_EVALUE, "after %s", status_message());
  ck_assert_str_eq(status_message(), "after first");
}
END_TEST

START_TEST(a_new_failure_drops_the_old_hint) {
  fail(ST_EIO, "one");
  fail_hint(ST_EIO, "try two");
  ck_assert_str_eq(status_hint(), "try two");
  fail(ST_EIO, "three");
  ck_assert_str_eq(status_hint(), "");
}
END_TEST

START_TEST(a_long_message_is_cut) {
  char words[8192];
  memset(words, 'x', sizeof words);
  words[sizeof words - 1] = 0;
  fail(ST_EVALUE, "%s", words);
  size_t length = strlen(status_message());
  ck_assert(length > 1000 && length < sizeof words);
  fail_context(ST_EVALUE, "%s", words);
  ck_assert_uint_eq(strlen(status_message()), length);
}
END_TEST

static void *fail_elsewhere(void *unused) {
  fail(ST_EIO, "elsewhere");
  return unused;
}

START_TEST(each_thread_has_its_own_record) {
  fail(ST_EVALUE, "here");
  pthread_t thread;
  ck_assert_int_eq(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
  pthread_join(thread, NULL);
  ck_assert_str_eq(status_message(), "here");
}
END_TEST

static Status three_tries(int fail_at, int *n_done) {
  for (int i = 0; i < 3; i++, ++*n_done) TRY(i == fail_at ? fail(ST_ERANGE, "at %d", i) : ST_OK);
  return ST_OK;
}

START_TEST(try_returns_at_the_first_failure) {
  int n_done = 0;
  ck_assert_int_eq(three_tries(1, &n_done), ST_ERANGE);
  ck_assert_int_eq(n_done, 1);
}
END_TEST

START_TEST(every_status_has_words) {
#define X(name, words) ck_assert_str_eq(status_words(ST_##name), words);
  STATUS_LIST(X)
#undef X
}
END_TEST

Suite *status_suite(void);
Suite *status_suite(void) {
  Suite *suite = suite_create("status");
  TCase *tcase = tcase_create("record");
  tcase_add_test(tcase, fail_keeps_words_and_returns_status);
  tcase_add_test(tcase, context_comes_in_front);
  tcase_add_test(tcase, a_message_may_quote_the_one_before);
  tcase_add_test(tcase, a_new_failure_drops_the_old_hint);
  tcase_add_test(tcase, a_long_message_is_cut);
  tcase_add_test(tcase, each_thread_has_its_own_record);
  tcase_add_test(tcase, try_returns_at_the_first_failure);
  tcase_add_test(tcase, every_status_has_words);
  suite_add_tcase(suite, tcase);
  return suite;
}
