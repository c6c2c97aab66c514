// test_sched_text - schedules as text: CSV in and out, torch's lists, JSON, drawings, the command.
#include "core/json.h"
#include "parallel/sched_cli.h"
#include "tests/sched_common.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static SchedArena arena;
static void open_arena(void) { sched_heap_open(&arena); }
static void close_arena(void) { sched_heap_close(&arena); }

static const char *csv_of(SchedArena *a, const Sched *sched) {
  SchedText text = {.arena = a};
  SchedOut out = sched_text_out(&text);
  sched_print_csv(&out, sched);
  return text.text;
}

static Sched *parse(SchedArena *a, const char *text) {
  Sched *sched = NULL;
  Status status = sched_parse_csv(a, &sched, "read", text, strlen(text));
  ck_assert_msg(status == ST_OK, "%s in\n%s", a->message, text);
  return sched;
}

// ---- numbers and words -----------------------------------------------------------------------

static const char *printed(double x) {
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  sched_print(&out, "%g", x);
  return text.text;
}

START_TEST(numbers_are_printed_short_and_read_back) {
  ck_assert_str_eq(printed(0), "0");
  ck_assert_str_eq(printed(33), "33");
  ck_assert_str_eq(printed(-1.5), "-1.5");
  ck_assert_str_eq(printed(0.1 + 0.2), "0.3");
  ck_assert_str_eq(printed(1.0 / 3), "0.333333333333");
  ck_assert_str_eq(printed(123456.75), "123456.75");
  ck_assert_str_eq(printed(1e-5), "0.00001");
  ck_assert_str_eq(printed(1e15), "1e15");
  ck_assert_str_eq(printed((double)NAN), "nan");
  ck_assert_str_eq(printed((double)INFINITY), "inf");
  uint64_t bits = 1;
  for (int i = 0; i < 20000; i++) {
    bits = bits * 6364136223846793005u + 1442695040888963407u;
    double x = ldexp((double)(bits >> 11), (int)(bits % 1800) - 900);
    double back = strtod(printed(x), NULL);
    ck_assert_msg(fabs(back - x) <= 2e-11 * x, "%.17g printed as %s", x, printed(x));
    if (i % 100 == 99) close_arena(), open_arena();
  }
}
END_TEST

START_TEST(formats_pad_and_cut) {
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  sched_print(&out, "[%5d|%-5d|%*d|%.2s|%.*s|%-4s|%c|%lld|%.1g|%%]", 42, -42, 4, 7, "abc", 1, "abc",
              "x", 'y', -9223372036854775807LL - 1, 2.25);
  ck_assert_str_eq(text.text, "[   42|-42  |   7|ab|a|x   |y|-9223372036854775808|2.3|%]");
}
END_TEST

// ---- CSV -------------------------------------------------------------------------------------

static void comes_back(SchedArena *a, const SchedType *type, int ranks, int chunks, int mbs) {
  Sched *sched = make(a, type->name, ranks, chunks, mbs, 0);
  const char *text = csv_of(a, sched);
  Sched *back = parse(a, text);
  ck_assert_int_eq(back->ranks, ranks);
  ck_assert_int_eq(back->chunks, chunks);
  ck_assert_int_eq(back->mbs, mbs);
  ck_assert_int_eq(memcmp(back->holder, sched->holder, (size_t)sched->stages * sizeof(int)), 0);
  ck_assert_str_eq(csv_of(a, back), text);
  Sched *low = lower(a, sched, NULL); // with messages, too
  text = csv_of(a, low);
  back = parse(a, text);
  ck_assert(back->lowered);
  ck_assert_str_eq(csv_of(a, back), text);
  ck_assert_int_eq(check(a, back)->broken, 0);
}

START_TEST(csv_comes_back_the_same) { each_case(comes_back, 4, 4); }
END_TEST

START_TEST(csv_with_pairs_idle_cells_quotes_and_blanks_is_read) {
  Sched *sched = parse(&arena, "0F0,0F1,,\"0B0\", 0B1 \r\n,1F0,(1F1;1B0)OVERLAP_F_B,,1I1,1W1,\n");
  ck_assert(sched->ranks == 2 && sched->chunks == 1 && sched->mbs == 2 && !sched->lowered);
  ck_assert_str_eq(csv_of(&arena, sched), "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1I1,1W1\n");
  ck_assert_int_eq(check(&arena, sched)->broken, 0);
}
END_TEST

START_TEST(csv_that_is_wrong_is_refused_with_its_place) {
  static const struct {
    const char *text, *words;
  } cases[] = {
      {"", "no action"},
      {"\n\n", "no action"},
      {"0F0,0X0\n", "row 0, cell 1: `0X0` is not an action"},
      {"0F0,0F\n", "cell 1: `0F`"},
      {"0F0,F1\n", "cell 1: `F1`"},
      {"0F0,0F0extra\n", "`0F0extra`"},
      {"0F0,0REDUCE_GRAD3\n", "`0REDUCE_GRAD3`"},
      {"0F0,(0F1;0B0)OVERLAP\n", "`(0F1;0B0)OVERLAP`"},
      {"0F0,(0F1;0I0)OVERLAP_F_B\n", "is not an action"},
      {"0F0,(0F1)OVERLAP_F_B\n", "is not an action"},
      {"0F0,0F99999999999\n", "is not an action"},
      {"0F0,0F0\n1F0,1B0\n2F0,3F0\n", "4 stages on 3 rows"},
      {"0F0,0B0\n5F0,5B0\n", "no row runs stage 1"},
      {"999999999F0\n", "too large"},
      {"0F999999999\n", "microbatches"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Sched *sched = NULL;
    Status status = sched_parse_csv(&arena, &sched, "x", cases[i].text, strlen(cases[i].text));
    ck_assert_msg(status == ST_EFORMAT || status == ST_EVALUE, "%s: %d", cases[i].text, status);
    ck_assert_msg(strstr(arena.message, cases[i].words) != NULL, "\"%s\" without \"%s\"",
                  arena.message, cases[i].words);
    ck_assert_ptr_null(sched);
  }
}
END_TEST

START_TEST(damaged_csv_never_breaks_reader_checker_or_simulator) {
  static const char letters[] = "0123456789FIWB,;()\nSENDRECV_OLAPGTU:";
  static const char *const names[] = {"1f1b", "zbv", "dualpipev"};
  uint64_t bits = 7;
  for (int round = 0; round < 3000; round++) {
    SchedArena a;
    sched_heap_open(&a);
    Sched *sched = make(&a, names[round % 3], 2, 0, 3, 0);
    if (round % 2) sched = lower(&a, sched, NULL);
    const char *good = csv_of(&a, sched);
    size_t length = strlen(good);
    char *text = malloc(length); // without a final zero byte: sanitizers see a step beyond
    memcpy(text, good, length);
    for (int k = 0; k < 1 + round % 3; k++) {
      bits = bits * 6364136223846793005u + 1442695040888963407u;
      text[(bits >> 33) % length] = letters[(bits >> 20) % (sizeof letters - 1)];
    }
    SchedReport *report;
    SchedSim *sim;
    SchedCosts costs = sched_costs(1, 1, 1);
    if (sched_parse_csv(&a, &sched, "x", text, length) == ST_OK && sched->mbs < 1000) {
      ck_assert_int_eq(sched_check(&a, &report, sched), ST_OK);
      Status status = sched_simulate(&a, &sim, sched, &costs);
      ck_assert(report->broken != 0 || status == ST_OK);
      SchedText words = {.arena = &a};
      SchedOut out = sched_text_out(&words);
      sched_print_report(&out, sched, report, 80);
    }
    free(text);
    sched_heap_close(&a);
  }
}
END_TEST

// ---- torch's lists ---------------------------------------------------------------------------

static char *read_all(const char *path) {
  FILE *file = fopen(path, "rb");
  ck_assert_msg(file != NULL, "%s is missing", path);
  enum { ROOM = 1 << 16 };
  char *text = calloc(ROOM, 1);
  size_t length = fread(text, 1, ROOM - 1, file);
  ck_assert_uint_lt(length, ROOM - 1);
  fclose(file);
  return text;
}

// Made by tests/torch_schedules.py from torch's own generators. bfs differs by design: torch runs
// the backwards of a chunk from the last microbatch to the first, so its sums are to rounding.
START_TEST(torch_s_lists_are_ours_action_for_action) {
  static const char folder[] = "tests/golden/torch";
  DIR *dir = opendir(folder);
  ck_assert_msg(dir != NULL, "%s is missing: tests run in the root of the project", folder);
  int count = 0;
  for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
    char name[32], path[320];
    int ranks, chunks, mbs;
    if (sscanf(entry->d_name, "%31[^_]_p%d_v%d_m%d.csv", name, &ranks, &chunks, &mbs) != 4)
      continue;
    SchedArena a;
    sched_heap_open(&a);
    snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    char *text = read_all(path);
    Sched *theirs = parse(&a, text), *own = make(&a, name, ranks, chunks, mbs, 0);
    SchedReport *report = check(&a, theirs);
    ck_assert_msg(report->broken == 0, "%s: %s", entry->d_name, report->message);
    bool is_bfs = strcmp(name, "bfs") == 0;
    ck_assert_msg(report->is_to_rounding == is_bfs, "%s", entry->d_name);
    ck_assert_msg(is_bfs || strcmp(csv_of(&a, own), text) == 0, "%s differs", entry->d_name);
    free(text);
    sched_heap_close(&a);
    count++;
  }
  closedir(dir);
  ck_assert_int_ge(count, 30);
}
END_TEST

// ---- JSON ------------------------------------------------------------------------------------

static double number(const JsonValue *object, const char *key) {
  const JsonValue *value = json_get(object, key);
  ck_assert_msg(value != NULL && value->kind == JSON_NUMBER, "%s", key);
  return value->number;
}

START_TEST(json_has_all_that_is_known_of_a_schedule) {
  Sched *sched = make(&arena, "interleaved", 4, 2, 8, 0);
  SchedCosts costs = sched_costs(1, 1, 1);
  SchedSim *sim = simulate(&arena, sched, &costs);
  SchedReport *report = check(&arena, lower(&arena, sched, &costs));
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  sched_print_json(&out, sched, sim, &costs, report);
  JsonTree *tree;
  ck_assert_msg(json_parse(&tree, text.text, text.length) == ST_OK, "%s", status_message());
  const JsonValue *root = json_root(tree);
  ck_assert_str_eq(json_get(root, "schedule")->string, "interleaved");
  ck_assert_double_eq(number(root, "stages"), 8);
  ck_assert_double_eq(number(root, "microbatches"), 8);
  ck_assert_double_eq(number(root, "ranks"), 4);
  ck_assert_double_eq(number(root, "makespan"), 28.5);
  ck_assert_double_eq(number(root, "makespan_bubble"), 4.5);
  ck_assert_double_eq(number(root, "span_bubble"), 4.5);
  ck_assert_double_eq(number(json_get(root, "formula"), "makespan_bubble"), 4.5);
  ck_assert_int_eq(json_get(json_get(root, "formula"), "peak_activations")->count, 4);
  ck_assert_int_eq(json_get(root, "peak_activations")->count, 4);
  ck_assert_double_eq(json_get(root, "peak_activations")->first->number, 5.5);
  ck_assert_int_gt(json_get(root, "channel_depths")->count, 0);
  const JsonValue *row = json_get(root, "actions")->first;
  for (int rank = 0; rank < 4; rank++, row = row->next) {
    ck_assert_int_eq(row->count, 32);
    const JsonValue *action = row->first;
    for (int i = 0; i < 32; i++, action = action->next) {
      SchedSpan span = sim->span[sim->first[rank] + i];
      ck_assert_double_eq_tol(number(action, "start"), span.start, 1e-9);
      ck_assert_double_eq_tol(number(action, "end"), span.end, 1e-9);
      ck_assert_int_eq(json_get(action, "stage")->integer, sched->row[rank].action[i].stage);
    }
  }
  json_free(tree);
}
END_TEST

START_TEST(a_trace_is_json_without_overlapping_slices) {
  Sched *sched = make(&arena, "dualpipev", 2, 2, 6, 0);
  SchedCosts costs = sched_costs(1, 1, 1);
  costs.overlap = 2.5;
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  sched_draw_trace(&out, sched, simulate(&arena, sched, &costs), 1000);
  JsonTree *tree;
  ck_assert_msg(json_parse(&tree, text.text, text.length) == ST_OK, "%s", status_message());
  double end[2][2] = {{0}};
  int slices = 0;
  for (const JsonValue *e = json_get(json_root(tree), "traceEvents")->first; e; e = e->next) {
    if (strcmp(json_get(e, "ph")->string, "X") != 0) continue;
    double *last = &end[json_get(e, "pid")->integer][json_get(e, "tid")->integer];
    ck_assert_double_ge(number(e, "ts"), *last - 1e-6);
    *last = number(e, "ts") + number(e, "dur");
    slices++;
  }
  int actions = 0;
  for (int rank = 0; rank < 2; rank++)
    for (int i = 0; i < sched->row[rank].count; i++)
      actions += action_resource(sched->row[rank].action[i].kind) == USES_COMPUTE;
  ck_assert_int_eq(slices, actions);
  json_free(tree);
}
END_TEST

// ---- drawings --------------------------------------------------------------------------------

// Counts the elements of an XML text; every tag that opens is closed, in order.
static int elements(const char *text) {
  enum { DEPTH = 32 };
  char open[DEPTH][24];
  int depth = 0, count = 0;
  for (const char *at = strchr(text, '<'); at; at = strchr(at + 1, '<')) {
    const char *end = strchr(at, '>');
    ck_assert_ptr_nonnull(end);
    char name[24] = "";
    sscanf(at + (at[1] == '/' ? 2 : 1), "%23[a-z]", name);
    if (at[1] == '/') {
      ck_assert_int_gt(depth, 0);
      ck_assert_str_eq(open[--depth], name);
    } else if (end[-1] != '/') {
      ck_assert_int_lt(depth, DEPTH);
      strcpy(open[depth++], name);
    }
    count += at[1] != '/';
  }
  ck_assert_int_eq(depth, 0);
  return count;
}

static void svg_is_whole(SchedArena *a, const SchedType *type, int ranks, int chunks, int mbs) {
  Sched *sched = make(a, type->name, ranks, chunks, mbs, 0);
  SchedCosts costs = sched_costs(1, 2, 0.5);
  if (mbs % 2) costs.overlap = 3;
  SchedText text = {.arena = a};
  SchedOut out = sched_text_out(&text);
  sched_draw_svg(&out, sched, simulate(a, sched, &costs), &costs);
  int actions = 0;
  for (int rank = 0; rank < ranks; rank++)
    for (int i = 0; i < sched->row[rank].count; i++)
      actions += action_resource(sched->row[rank].action[i].kind) == USES_COMPUTE;
  ck_assert_int_gt(elements(text.text), 3 * actions);
  ck_assert_ptr_null(strstr(text.text, "nan"));
  ck_assert_ptr_null(strstr(text.text, "width=\"-"));
}

START_TEST(an_svg_is_well_formed_and_draws_every_action) { each_case(svg_is_whole, 3, 3); }
END_TEST

static int count_of(const char *text, const char *words) {
  int n = 0;
  for (const char *at = text; (at = strstr(at, words)) != NULL; at++) n++;
  return n;
}

START_TEST(predicted_and_measured_are_drawn_on_one_axis) {
  SchedCosts costs = sched_costs(0.010, 0.012, 0.008), mean;
  Sched *sched = lower(&arena, make(&arena, "zbv", 3, 2, 6, 0), &costs);
  costs.hop = 0.003, costs.reduce_grad = 0.002;
  SchedSim *slow = simulate(&arena, sched, &costs), *measured;
  ck_assert_int_eq(sched_measured(&arena, &measured, sched, slow->span, 1000), ST_OK);
  ck_assert_int_eq(sched_mean_costs(&arena, &mean, sched, measured), ST_OK);
  SchedSim *predicted = simulate(&arena, sched, &mean);
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  sched_draw_compare(&out, sched, predicted, measured);
  ck_assert_int_gt(elements(text.text), 2 * 3 * 3 * 2 * 6);
  ck_assert_ptr_nonnull(strstr(text.text, ">predicted<"));
  ck_assert_ptr_nonnull(strstr(text.text, ">measured<"));
  ck_assert_ptr_nonnull(strstr(text.text, "% more than predicted"));
  ck_assert_ptr_null(strstr(text.text, "nan"));
  ck_assert_int_eq(count_of(text.text, "<title>5W5 on rank 0, "), 2);
  ck_assert_int_eq(count_of(text.text, "<title>0REDUCE_GRAD on rank 0, "), 2);
  ck_assert_int_eq(count_of(text.text, ">0</text>"), count_of(text.text, ">1</text>") + 1); // axis
}
END_TEST

START_TEST(a_page_needs_nothing_from_elsewhere) {
  Sched *sched = make(&arena, "zbv", 4, 2, 8, 0);
  SchedCosts costs = sched_costs(1, 1, 1);
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  sched_draw_html(&out, sched, simulate(&arena, sched, &costs), &costs);
  ck_assert_ptr_null(strstr(text.text, "http"));
  ck_assert_ptr_null(strstr(text.text, "src="));
  ck_assert_ptr_null(strstr(text.text, "@import"));
  int curves = 0;
  for (const char *at = text.text; (at = strstr(at, "class=\"mem\"")) != NULL; at++) curves++;
  ck_assert_int_eq(curves, 4);
}
END_TEST

START_TEST(a_name_with_markup_is_escaped) {
  Sched *sched;
  ck_assert_int_eq(sched_new(&arena, &sched, "a<b>&\"", 1, 1, 1, PLACE_LOOP, NULL), ST_OK);
  ck_assert_int_eq(sched_push_text(sched, 0, "0F0", 3), ST_OK);
  ck_assert_int_eq(sched_push_text(sched, 0, "0B0", 3), ST_OK);
  SchedCosts costs = sched_costs(1, 1, 1);
  SchedSim *sim = simulate(&arena, sched, &costs);
  SchedText svg = {.arena = &arena}, json = {.arena = &arena};
  SchedOut out = sched_text_out(&svg);
  sched_draw_svg(&out, sched, sim, &costs);
  ck_assert_ptr_nonnull(strstr(svg.text, "a&lt;b&gt;&amp;&quot;"));
  elements(svg.text);
  out = sched_text_out(&json);
  sched_print_json(&out, sched, sim, &costs, NULL);
  JsonTree *tree;
  ck_assert_int_eq(json_parse(&tree, json.text, json.length), ST_OK);
  ck_assert_str_eq(json_get(json_root(tree), "schedule")->string, "a<b>&\"");
  json_free(tree);
}
END_TEST

static const char *drawn(const Sched *sched, const SchedCosts *costs, SchedTerminal terminal) {
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  sched_draw_terminal(&out, sched, simulate(&arena, sched, costs), &terminal);
  return text.text;
}

START_TEST(the_terminal_drawing_shows_times_to_scale) {
  SchedCosts costs = sched_costs(1, 1, 1);
  ck_assert_str_eq(drawn(make(&arena, "1f1b", 2, 1, 3, 0), &costs, (SchedTerminal){.width = 60}),
                   "       F forward   B backward   \n"
                   "rank 0 F0 F1 ......B0--- F2 B1--- ...B2--- \n"
                   "rank 1 ...F0 B0--- F1 B1--- F2 B2--- ......\n"
                   "       |0             |5             |10\n");
}
END_TEST

START_TEST(several_timelines_have_one_scale_and_one_axis) {
  SchedText text = {.arena = &arena};
  SchedOut out = sched_text_out(&text);
  SchedTerminal terminal = {.width = 28};
  Sched *sched = make(&arena, "1f1b", 2, 1, 2, 0);
  SchedCosts costs = sched_costs(1, 1, 1), slow = sched_costs(2, 1, 1);
  SchedTimeline both[] = {{"a", simulate(&arena, sched, &costs)},
                          {"b", simulate(&arena, sched, &slow)}};
  sched_draw_terminals(&out, sched, both, 2, &terminal);
  ck_assert_str_eq(text.text, "       F forward   B backward   \n"
                              "a\n"
                              "rank 0 F0 F1 ......B0--- ..\n"
                              "rank 1 ...F0 B0--- F1 B1---\n"
                              "b\n"
                              "rank 0 F0--- F1--- ......B0\n"
                              "rank 1 ......F0--- B0--- F1\n"
                              "       |0             |5\n"
                              "\n"
                              "a\n"
                              "rank 0 .B1--- \n"
                              "rank 1  ......\n"
                              "b\n"
                              "rank 0 --- ......B1--- \n"
                              "rank 1 --- B1--- ......\n"
                              "                 |10\n");
}
END_TEST

START_TEST(a_pair_has_two_halves_in_the_terminal) {
  Sched *sched = parse(&arena, "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
  SchedCosts costs = sched_costs(1, 1, 1);
  costs.overlap = 2;
  ck_assert_str_eq(drawn(sched, &costs, (SchedTerminal){.width = 60}),
                   "       F forward   B backward   \n"
                   "rank 0 F0 F1 B0 B1--- \n"
                   "       |0\n");
}
END_TEST

START_TEST(the_terminal_drawing_keeps_to_the_width_and_to_plain_text) {
  SchedCosts costs = sched_costs(1, 1, 0.01);
  static const char *const names[] = {"gpipe", "zbv", "hanayo", "dualpipev"};
  for (int width = 40; width <= 200; width += 40) {
    for (int i = 0; i < 4; i++) {
      Sched *sched = make(&arena, names[i], 4, 0, 20, 0);
      const char *text = drawn(sched, &costs, (SchedTerminal){.width = width});
      ck_assert_ptr_null(strchr(text, '\x1b'));
      const char *line = strchr(text, '\n') + 1; // the legend may be longer
      for (; *line; line += strcspn(line, "\n") + 1)
        ck_assert_msg(strcspn(line, "\n") <= (size_t)width, "%s: %.200s", names[i], line);
    }
  }
  const char *colour = drawn(make(&arena, "gpipe", 2, 1, 2, 0), &costs,
                             (SchedTerminal){.width = 80, .colour = SCHED_COLOUR_256});
  ck_assert_ptr_nonnull(strstr(colour, "\x1b[30;48;5;"));
}
END_TEST

// ---- the command -----------------------------------------------------------------------------

static char out_text[1 << 20], err_text[1 << 16];

// Runs `schedule` with words separated by blanks; returns the exit code.
static int schedule(const char *words) {
  char copy[512], word0[] = "schedule", *argv[32] = {word0};
  int argc = 1;
  snprintf(copy, sizeof copy, "%s", words);
  for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
  memset(out_text, 0, sizeof out_text);
  memset(err_text, 0, sizeof err_text);
  FILE *out = tmpfile(), *err = tmpfile();
  ck_assert(out && err);
  int code = sched_main(argc, argv, out, err, NULL, NULL);
  rewind(out), rewind(err);
  ck_assert_uint_lt(fread(out_text, 1, sizeof out_text, out), sizeof out_text);
  ck_assert_uint_lt(fread(err_text, 1, sizeof err_text, err), sizeof err_text);
  fclose(out), fclose(err);
  return code;
}

static void usage_error(const char *words, const char *expected) {
  ck_assert_msg(schedule(words) == 2, "%s: exit code is not 2", words);
  ck_assert_msg(strstr(err_text, expected) != NULL, "%s: \"%s\" without \"%s\"", words, err_text,
                expected);
  ck_assert_str_eq(out_text, "");
}

START_TEST(wrong_usage_names_the_option_and_what_is_valid) {
  usage_error("", "--list");
  usage_error("1f1", "did you mean 1f1b?");
  usage_error("1f1b -m 4", "-p is missing");
  usage_error("1f1b -p 4", "-m is missing");
  usage_error("1f1b -p 0 -m 4", "-p 0: expected a whole number from 1 to");
  usage_error("1f1b -p 2x -m 4", "-p 2x: expected a whole number");
  usage_error("1f1b -p 99999999999999999999 -m 4", "expected a whole number from 1 to 1048576");
  usage_error("1f1b -p 64 -m 99999", "-m 99999 on 64 stages is too large: p times v times m may be "
                                     "up to 1048576, here -m 16384");
  usage_error("interleaved -p 1024 -v 2000 -m 1", "-p 1024 with 2000 stages each is too large");
  usage_error("1f1b -p 4 -m", "-m needs a value");
  usage_error("1f1b -p 4 -m 4 --formt csv", "did you mean --format?");
  usage_error("1f1b -p 4 -m 4 --format pdf", "text, csv, json, svg, html or trace");
  usage_error("1f1b -p 4 -m 4 --costs 1,2", "F,I,W");
  usage_error("1f1b -p 4 -m 4 --costs 1,2,x", "F,I,W");
  usage_error("1f1b -p 4 -m 4 --costs 1,-2,1", "F,I,W");
  usage_error("1f1b -p 4 -m 4 --costs 0,0,0", "F,I,W");
  usage_error("1f1b -p 4 -m 4 --hop -1", "--hop -1: expected a time from 0 on");
  usage_error("1f1b -p 4 -m 4 --overlap nan", "--overlap nan");
  usage_error("1f1b -p 4 -m 4 -v 2", "exactly 1 stage a rank, not 2");
  usage_error("hanayo -p 4 -m 4 -v 3", "2, 4, 6, ...");
  usage_error("1f1b -p 4 -m 4 --group 2", "only interleaved has groups");
  usage_error("1f1b gpipe -p 4 -m 4", "one schedule at a time");
  usage_error("1f1b -p 4 -m 4 --format csv --explain", "--format text");
  usage_error("x.csv -p 4", "no -p, -v, -m or --group");
}
END_TEST

START_TEST(a_schedule_is_drawn_simulated_and_checked) {
  ck_assert_int_eq(schedule("1F1B -p 4 -m 8"), 0);
  ck_assert_str_eq(err_text, "");
  ck_assert_ptr_nonnull(strstr(out_text, "makespan            33"));
  ck_assert_ptr_nonnull(strstr(out_text, "makespan bubble     9, 37.5% over ideal; by formula 9"));
  ck_assert_ptr_nonnull(strstr(out_text, "peak activations    4 3 2 1 "));
  ck_assert_ptr_nonnull(strstr(out_text, "invariants 1 to 7 hold; so does 8"));
  ck_assert_int_eq(schedule("1f1b -p=4 -m=8 --hop=.1 --explain"), 0);
  ck_assert_ptr_nonnull(strstr(out_text, "under way"));
  ck_assert_ptr_nonnull(strstr(out_text, "rank 3: 3F"));
}
END_TEST

START_TEST(every_format_of_every_schedule_comes_out) {
  static const char *const formats[] = {"text", "csv", "json", "svg", "html", "trace"};
  int count;
  const SchedType *type = sched_types(&count);
  for (int i = 0; i < count; i++, type++) {
    for (int k = 0; k < 6; k++) {
      char words[128];
      snprintf(words, sizeof words, "%s -p 3 -m 5 --format %s --overlap 2.5 --costs 1,1.5,0.5",
               type->name, formats[k]);
      ck_assert_msg(schedule(words) == 0, "%s: %s", words, err_text);
      ck_assert_uint_gt(strlen(out_text), 50);
    }
  }
}
END_TEST

START_TEST(the_list_names_all_and_help_all_options) {
  int count;
  const SchedType *type = sched_types(&count);
  ck_assert_int_eq(schedule("--list"), 0);
  for (int i = 0; i < count; i++) {
    ck_assert_ptr_nonnull(strstr(out_text, type[i].name));
    ck_assert_ptr_nonnull(strstr(out_text, type[i].alias));
    ck_assert_ptr_nonnull(strstr(out_text, type[i].help));
  }
  ck_assert_int_eq(schedule("--help"), 0);
  ck_assert_ptr_nonnull(strstr(out_text, "--overlap X"));
}
END_TEST

START_TEST(a_deadlock_is_refused_with_the_cycle_and_exit_code_1) {
  ck_assert_int_eq(schedule("interleaved -p 5 -v 2 -m 16 --group 2"), 1);
  ck_assert_str_eq(out_text, "");
  ck_assert_ptr_nonnull(strstr(err_text, "breaks invariant 4"));
  ck_assert_ptr_nonnull(strstr(err_text, "^ here"));
  ck_assert_ptr_nonnull(strstr(err_text, "who waits for whom"));
  ck_assert_int_eq(schedule("interleaved -p 4 -v 2 -m 16 --group 5"), 0);
  ck_assert_ptr_nonnull(strstr(out_text, "warning"));
  ck_assert_int_eq(schedule("interleaved -p 4 -v 2 -m 16 --group 5 --format csv"), 0);
  ck_assert_ptr_nonnull(strstr(err_text, "warning"));
}
END_TEST

START_TEST(a_csv_file_is_judged_like_a_known_schedule) {
  ck_assert_int_eq(schedule("tests/golden/torch/zbv_p4_v2_m8.csv"), 0);
  ck_assert_ptr_nonnull(strstr(out_text, "makespan bubble     1.5"));
  ck_assert_int_eq(schedule("tests/golden/torch/no_such_file.csv"), 2);
  ck_assert_ptr_nonnull(strstr(err_text, "no_such_file.csv: No such file"));
}
END_TEST

Suite *sched_text_suite(void);
Suite *sched_text_suite(void) {
  Suite *suite = suite_create("sched_text");
  TCase *tcase = tcase_create("text");
  tcase_set_timeout(tcase, 60);
  tcase_add_checked_fixture(tcase, open_arena, close_arena);
  tcase_add_test(tcase, numbers_are_printed_short_and_read_back);
  tcase_add_test(tcase, formats_pad_and_cut);
  tcase_add_test(tcase, csv_comes_back_the_same);
  tcase_add_test(tcase, csv_with_pairs_idle_cells_quotes_and_blanks_is_read);
  tcase_add_test(tcase, csv_that_is_wrong_is_refused_with_its_place);
  tcase_add_test(tcase, damaged_csv_never_breaks_reader_checker_or_simulator);
  tcase_add_test(tcase, torch_s_lists_are_ours_action_for_action);
  tcase_add_test(tcase, json_has_all_that_is_known_of_a_schedule);
  tcase_add_test(tcase, a_trace_is_json_without_overlapping_slices);
  suite_add_tcase(suite, tcase);
  tcase = tcase_create("drawings");
  tcase_add_checked_fixture(tcase, open_arena, close_arena);
  tcase_add_test(tcase, an_svg_is_well_formed_and_draws_every_action);
  tcase_add_test(tcase, predicted_and_measured_are_drawn_on_one_axis);
  tcase_add_test(tcase, a_page_needs_nothing_from_elsewhere);
  tcase_add_test(tcase, a_name_with_markup_is_escaped);
  tcase_add_test(tcase, the_terminal_drawing_shows_times_to_scale);
  tcase_add_test(tcase, a_pair_has_two_halves_in_the_terminal);
  tcase_add_test(tcase, several_timelines_have_one_scale_and_one_axis);
  tcase_add_test(tcase, the_terminal_drawing_keeps_to_the_width_and_to_plain_text);
  suite_add_tcase(suite, tcase);
  tcase = tcase_create("command");
  tcase_set_timeout(tcase, 60);
  tcase_add_test(tcase, wrong_usage_names_the_option_and_what_is_valid);
  tcase_add_test(tcase, a_schedule_is_drawn_simulated_and_checked);
  tcase_add_test(tcase, every_format_of_every_schedule_comes_out);
  tcase_add_test(tcase, the_list_names_all_and_help_all_options);
  tcase_add_test(tcase, a_deadlock_is_refused_with_the_cycle_and_exit_code_1);
  tcase_add_test(tcase, a_csv_file_is_judged_like_a_known_schedule);
  suite_add_tcase(suite, tcase);
  return suite;
}
