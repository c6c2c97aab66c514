// sched_draw - a schedule's timeline in a terminal, and the colours that all drawings share.
//
//     rank 0  F0 F1 F2 F3 ......... B0--- F4 B1--- ...       without colour
//     rank 1     F0 F1 F2 ...
//
// The hue of an action is its stage, from blue (the first) to red (the last); its shade the kind: F
// light, I middle, W greyish, B dark.
#include "parallel/sched_draw.h"

// ---- colours ---------------------------------------------------------------------------------

// Equal steps in hue at constant lightness and chroma in OKLCH, for each kind; 0xrrggbb.
enum { HUES = 10 };
static const uint32_t shades[4][HUES] = {
    {0xbedaff, 0xabe1ff, 0x9ee7f6, 0xa0eadf, 0xb0e9c6, 0xc7e4b1, 0xe1dca3, 0xf3d4a1, 0xffcdaa,
     0xffc7bc},
    {0x7faafa, 0x53b5f0, 0x1cbfd8, 0x24c4b4, 0x5cc38c, 0x8dbb66, 0xb8ae47, 0xd4a143, 0xe69558,
     0xef8b7b},
    {0x6e81a2, 0x61859e, 0x588993, 0x598b84, 0x648b74, 0x748765, 0x85825c, 0x927d5b, 0x9a7860,
     0x9f746d},
    {0x3860ac, 0x006ba4, 0x00748e, 0x007a6c, 0x007845, 0x467212, 0x706500, 0x895800, 0x994b00,
     0xa04034},
};

SchedColour sched_colour(const Sched *sched, ActionKind kind, int stage) {
  int shade = kind == ACTION_F ? 0 : kind == ACTION_I ? 1 : kind == ACTION_W ? 2 : 3;
  int last = sched->stages > 1 ? sched->stages - 1 : 1;
  double x = (double)(stage % sched->stages) * (HUES - 1) / last;
  int low = (int)x < HUES - 1 ? (int)x : HUES - 2;
  SchedColour colour = {.text_is_light = shade >= 2};
  int *channel[3] = {&colour.r, &colour.g, &colour.b};
  for (int i = 0; i < 3; i++) {
    int a = (int)(shades[shade][low] >> (16 - 8 * i) & 255);
    int b = (int)(shades[shade][low + 1] >> (16 - 8 * i) & 255);
    *channel[i] = (int)(a + (b - a) * (x - low) + 0.5);
  }
  return colour;
}

void sched_legend(const Sched *sched, SchedLegend legend[SCHED_LEGENDS]) {
  bool splits = false, fuses = false;
  for (int rank = 0; rank < sched->ranks; rank++) {
    for (int i = 0; i < sched->row[rank].count; i++) {
      splits = splits || sched->row[rank].action[i].kind == ACTION_I;
      fuses = fuses || sched->row[rank].action[i].kind == ACTION_B;
    }
  }
  legend[0] = (SchedLegend){ACTION_F, "F forward", true};
  legend[1] = (SchedLegend){ACTION_B, "B backward", fuses};
  legend[2] = (SchedLegend){ACTION_I, "I backward for inputs", splits};
  legend[3] = (SchedLegend){ACTION_W, "W backward for weights", splits};
}

// ---- layout ----------------------------------------------------------------------------------

// How a timeline is cut into columns and bands.
typedef struct Layout {
  const Sched *sched;
  const SchedSim *sim;
  const SchedTerminal *terminal;
  double scale;      // columns a unit of time
  int columns, room; // of the whole time; of one band at most
  int label;         // of the rank's name
  bool names_stage;  // labels are 2F0, not F0
} Layout;

static int column(const Layout *layout, double time) { return (int)(time * layout->scale + 0.5); }

int sched_digits(int n) {
  int digits = 1;
  for (; n >= 10; n /= 10) digits++;
  return digits;
}

static Layout lay_out(const Sched *sched, const SchedSim *sim, const SchedTerminal *terminal) {
  enum { BANDS_MAX = 24, WIDEST = 1 << 20, LEAST_BAND = 16 };
  Layout layout = {.sched = sched, .sim = sim, .terminal = terminal};
  bool has_colour = terminal->colour != SCHED_COLOUR_NONE;
  layout.label = 6 + sched_digits(sched->ranks - 1);
  layout.names_stage = sched->chunks > 1 && !has_colour;
  int cell = sched_digits(sched->mbs - 1) + (has_colour ? 1 : 2) +
             (layout.names_stage ? sched_digits(sched->stages - 1) : 0);
  int room = terminal->width > 0 ? terminal->width - layout.label - 1 : WIDEST;
  if (room < LEAST_BAND) room = LEAST_BAND;
  double least = sched_shortest(sched, sim), time = sim->makespan > 0 ? sim->makespan : 1;
  double columns = least > 0 ? cell * time / least : room;
  double most = terminal->width > 0 ? (double)room * BANDS_MAX : WIDEST;
  if (columns > most) columns = most;
  layout.scale = columns / time;
  layout.columns = column(&layout, time);
  layout.room = room;
  return layout;
}

// ---- drawing ---------------------------------------------------------------------------------

// The nearest of the six levels 0, 95, 135, ... 255 of a terminal's colour cube.
static int cube_level(int x) { return x < 48 ? 0 : x < 115 ? 1 : (x - 35) / 40; }

static void set_colour(const Layout *layout, const SchedOut *out, const SchedColour *colour) {
  if (layout->terminal->colour == SCHED_COLOUR_NONE) return;
  if (!colour)
    sched_print(out, "\x1b[0m");
  else if (layout->terminal->colour == SCHED_COLOUR_TRUE)
    sched_print(out, "\x1b[%d;48;2;%d;%d;%dm", colour->text_is_light ? 97 : 30, colour->r,
                colour->g, colour->b);
  else {
    int r = cube_level(colour->r), g = cube_level(colour->g), b = cube_level(colour->b);
    sched_print(out, "\x1b[%d;48;5;%dm", colour->text_is_light ? 97 : 30, 16 + 36 * r + 6 * g + b);
  }
}

// One action, from column `from` to `to`, of which [begin, end) is in the band.
static void draw_action(const Layout *layout, const SchedOut *out, Action action, int from, int to,
                        int begin, int end) {
  bool has_colour = layout->terminal->colour != SCHED_COLOUR_NONE;
  char label[40] = "";
  if (has_colour)
    sched_format(label, sizeof label, "%d", action.mb);
  else if (layout->names_stage)
    sched_format(label, sizeof label, "%d%s%d", action.stage, action_text(action.kind), action.mb);
  else
    sched_format(label, sizeof label, "%s%d", action_text(action.kind), action.mb);
  int length = sched_length(label);
  if (length > to - from && to > from) { // the kind alone is better than half a number
    length = 1;
    label[0] = has_colour ? ' ' : action_text(action.kind)[0];
  }
  int skip = has_colour ? (to - from - length) / 2 : 0;
  SchedColour colour = sched_colour(layout->sched, action.kind, action.stage);
  set_colour(layout, out, &colour);
  for (int i = begin; i < end; i++) {
    int k = i - from - skip;
    char fill = has_colour || i == to - 1 ? ' ' : '-';
    sched_print(out, "%c", k >= 0 && k < length ? label[k] : fill);
  }
  set_colour(layout, out, NULL);
}

// Idle columns, faint where there is colour.
static void draw_idle(const Layout *layout, const SchedOut *out, int columns) {
  bool has_colour = layout->terminal->colour != SCHED_COLOUR_NONE;
  if (columns > 0 && has_colour) sched_print(out, "\x1b[2m");
  for (int i = 0; i < columns; i++) sched_print(out, "%c", '.');
  if (columns > 0 && has_colour) sched_print(out, "\x1b[0m");
}

// The part of a rank's line in columns [begin, end); nothing but the name if they are none.
static void draw_rank(const Layout *layout, const SchedOut *out, int rank, int begin, int end) {
  const SchedRow *row = &layout->sched->row[rank];
  const SchedSpan *span = layout->sim->span + layout->sim->first[rank];
  int cursor = begin;
  sched_print(out, "rank %-*d ", layout->label - 6, rank);
  for (int i = 0; i < row->count && cursor < end; i++) {
    if (action_resource(row->action[i].kind) != USES_COMPUTE) continue;
    int from = column(layout, span[i].start), to = column(layout, span[i].end);
    int half = sched_pair_half(layout->sched, layout->sim, rank, i); // each has half the time
    if (half == 1) to = (from + to + 1) / 2;
    if (half == 2) from = (from + to + 1) / 2;
    if (to <= cursor || from >= end) continue;
    draw_idle(layout, out, from - cursor);
    if (from > cursor) cursor = from;
    int stop = to < end ? to : end;
    draw_action(layout, out, row->action[i], from, to, cursor, stop);
    cursor = stop;
  }
  draw_idle(layout, out, end - cursor);
  sched_print(out, "\n");
}

double sched_tick(double time, int at_most) {
  static const double steps[] = {1, 2, 5};
  double power = 1;
  if (!(time > 0) || at_most < 1) return 1;
  while (power * at_most > time) power /= 10;
  for (;; power *= 10)
    for (int i = 0; i < 3; i++)
      if (power * steps[i] * at_most >= time) return power * steps[i];
}

// Times below a band, about every 12 columns.
static void draw_axis(const Layout *layout, const SchedOut *out, int begin, int end) {
  double time = layout->columns / layout->scale;
  double step = sched_tick(time, layout->columns / 12 > 1 ? layout->columns / 12 : 1);
  int cursor = begin;
  sched_print(out, "%*s", layout->label, "");
  for (int k = (int)(begin / layout->scale / step); k * step <= time; k++) {
    char label[32];
    int at = column(layout, k * step);
    sched_format(label, sizeof label, "|%g", k * step);
    int length = sched_length(label);
    if (at < cursor) continue;
    if (at + length > end) break;
    sched_print(out, "%*s%s", at - cursor, "", label);
    cursor = at + length;
  }
  sched_print(out, "\n");
}

static void draw_legend(const Layout *layout, const SchedOut *out) {
  SchedLegend legend[SCHED_LEGENDS];
  sched_legend(layout->sched, legend);
  sched_print(out, "%*s", layout->label, "");
  for (int i = 0; i < SCHED_LEGENDS; i++) {
    if (!legend[i].is_used) continue;
    SchedColour colour = sched_colour(layout->sched, legend[i].kind, 0);
    set_colour(layout, out, &colour);
    bool has_colour = layout->terminal->colour != SCHED_COLOUR_NONE;
    sched_print(out, has_colour ? " %s " : "%s  ", legend[i].words);
    set_colour(layout, out, NULL);
    sched_print(out, " ");
  }
  if (layout->terminal->colour != SCHED_COLOUR_NONE && layout->sched->stages > 1) {
    sched_print(out, " stage ");
    int shown = layout->sched->stages < 8 ? layout->sched->stages : 8;
    for (int i = 0; i < shown; i++) {
      int stage = shown > 1 ? i * (layout->sched->stages - 1) / (shown - 1) : 0;
      SchedColour colour = sched_colour(layout->sched, ACTION_F, stage);
      set_colour(layout, out, &colour);
      sched_print(out, " %d ", stage);
    }
    set_colour(layout, out, NULL);
  }
  sched_print(out, "\n");
}

static int least_of(int a, int b) { return a < b ? a : b; }

void sched_draw_terminals(const SchedOut *out, const Sched *sched, const SchedTimeline *timeline,
                          int n, const SchedTerminal *terminal) {
  Layout layout = lay_out(sched, timeline[0].sim, terminal);
  for (int i = 1; i < n; i++) {
    int columns = column(&layout, timeline[i].sim->makespan);
    if (columns > layout.columns) layout.columns = columns;
  }
  draw_legend(&layout, out);
  for (int begin = 0; begin < layout.columns; begin += layout.room) {
    int end = least_of(begin + layout.room, layout.columns);
    if (begin > 0) sched_print(out, "\n");
    for (int i = 0; i < n; i++) {
      layout.sim = timeline[i].sim;
      if (timeline[i].title) sched_print(out, "%s\n", timeline[i].title);
      int own_end = least_of(end, column(&layout, layout.sim->makespan));
      for (int rank = 0; rank < sched->ranks; rank++) draw_rank(&layout, out, rank, begin, own_end);
    }
    draw_axis(&layout, out, begin, end);
  }
}

void sched_draw_terminal(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                         const SchedTerminal *terminal) {
  sched_draw_terminals(out, sched, &(SchedTimeline){NULL, sim}, 1, terminal);
}
