// sched_draw - what the drawings share: colours, time axes, the geometry of a timeline in SVG.
#ifndef RILLE_PARALLEL_SCHED_DRAW_H
#define RILLE_PARALLEL_SCHED_DRAW_H

#include "parallel/sched_inner.h"

// A background, 0 to 255, and whether text on it must be light.
typedef struct SchedColour {
  int r, g, b;
  bool text_is_light;
} SchedColour;
SchedColour sched_colour(const Sched *sched, ActionKind kind, int stage);

// A kind of compute action in a legend, and whether the schedule has any.
typedef struct SchedLegend {
  ActionKind kind;
  const char *words;
  bool is_used;
} SchedLegend;
enum { SCHED_LEGENDS = 4 };
void sched_legend(const Sched *sched, SchedLegend legend[SCHED_LEGENDS]);

// Decimal digits of n >= 0.
int sched_digits(int n);

// A round step (1, 2 or 5 times a power of ten) that cuts `time` into at most `at_most` parts.
double sched_tick(double time, int at_most);

// The shortest compute action that takes time.
double sched_shortest(const Sched *sched, const SchedSim *sim);

// Whether an action is the F (1) or the B (2) of a pair that runs at once; else 0.
int sched_pair_half(const Sched *sched, const SchedSim *sim, int rank, int index);

// A timeline in SVG, in pixels: time runs from `left` to the right, ranks from `top` down.
typedef struct SchedFrame {
  const Sched *sched;
  const SchedSim *sim;
  const SchedCosts *costs;
  double left, top, scale; // scale: pixels a unit of time
  double lane, pitch;      // height of a rank's lane; distance of lanes
  double right, bottom;    // of the whole
} SchedFrame;
enum { SCHED_MARGIN = 20 }; // pixels around a drawing
SchedFrame sched_frame(const Sched *sched, const SchedSim *sim, const SchedCosts *costs,
                       double top);

// Its style sheet, its lanes with their actions, its time axis from `top` to `bottom`, its legend.
void sched_svg_style(const SchedOut *out);
void sched_svg_lanes(const SchedOut *out, const SchedFrame *frame);
void sched_svg_axis(const SchedOut *out, const SchedFrame *frame, double top, double bottom);
void sched_svg_legend(const SchedOut *out, const SchedFrame *frame, double y);

// Text for SVG and HTML, with & < > " written as entities.
void sched_print_escaped(const SchedOut *out, const char *text);

// "1f1b: 4 ranks, 8 microbatches", and the costs and bubbles in one line.
void sched_print_title(const SchedOut *out, const Sched *sched);
void sched_print_caption(const SchedOut *out, const SchedSim *sim, const SchedCosts *costs);

#endif
