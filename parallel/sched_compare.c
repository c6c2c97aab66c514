// sched_compare - predicted above measured: two timelines of the same lists on one time axis.
//
//     title                                       F  B   stage 0 ... 7
//     predicted from the mean times: step, bubble
//     rank 0  [0][1][2][3]///////[ 0 ][4][ 1 ]
//     measured: step, bubble
//     rank 0  [0][1][2] [3]///////[ 0 ] [4][ 1 ]
//             |0      |5      |10 ms
#include "parallel/sched_draw.h"

static void print_figures(const SchedOut *out, const char *what, const SchedSim *sim, double y) {
  double ideal = sim->makespan - sim->makespan_bubble;
  sched_print(out,
              "<text x=\"%d\" y=\"%g\"><tspan font-weight=\"600\">%s</tspan>: step %.2g ms, bubble "
              "%.2g ms (%.1g%% over ideal), between steps %.2g ms</text>\n",
              (int)SCHED_MARGIN, y, what, sim->makespan, sim->makespan_bubble,
              ideal > 0 ? 100 * sim->makespan_bubble / ideal : 0, sim->span_bubble);
}

// How far the measured step is from the predicted one, in words.
static void print_difference(const SchedOut *out, const SchedSim *predicted,
                             const SchedSim *measured) {
  double more = predicted->makespan > 0 ? 100 * (measured->makespan / predicted->makespan - 1) : 0;
  sched_print(out, "the measured step takes %.1g%% %s than predicted from its own mean times",
              more < 0 ? -more : more, more < 0 ? "less" : "more");
}

// Pixels of the time axis: room for the number of an action of average length on the rank with
// most of them. (The shortest one may be a thousandth of the others here.)
static double width_of(const Sched *sched) {
  enum { CELL = 24, NARROWEST = 700, WIDEST = 6000 };
  int most = 0;
  for (int rank = 0; rank < sched->ranks; rank++) {
    int count = 0;
    for (int i = 0; i < sched->row[rank].count; i++)
      count += action_resource(sched->row[rank].action[i].kind) == USES_COMPUTE;
    if (count > most) most = count;
  }
  double width = (double)CELL * most;
  return width < NARROWEST ? NARROWEST : width > WIDEST ? WIDEST : width;
}

void sched_draw_compare(const SchedOut *out, const Sched *sched, const SchedSim *predicted,
                        const SchedSim *measured) {
  enum { TOP = 104, HEADING = 22, BETWEEN = 46 };
  SchedFrame above = sched_frame(sched, predicted, NULL, TOP + HEADING);
  double longest =
      predicted->makespan > measured->makespan ? predicted->makespan : measured->makespan;
  above.scale = width_of(sched) / (longest > 0 ? longest : 1);
  SchedFrame below = above;
  below.sim = measured;
  below.top = above.bottom + BETWEEN;
  below.bottom = below.top + (above.bottom - above.top);
  above.right = below.right = above.left + longest * above.scale;
  double width = above.right + SCHED_MARGIN, height = below.bottom + 28;
  if (width < 640) width = 640;
  sched_print(
      out,
      "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"tl\" width=\"%.1g\" height=\"%.1g\" "
      "viewBox=\"0 0 %.1g %.1g\">\n<title>",
      width, height, width, height);
  sched_print_title(out, sched);
  sched_print(out, ": predicted and measured</title>\n");
  sched_svg_style(out);
  sched_print(out,
              "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n"
              "<text class=\"title\" x=\"%d\" y=\"30\">",
              (int)SCHED_MARGIN);
  sched_print_title(out, sched);
  sched_print(out, "</text>\n<text class=\"dim\" x=\"%d\" y=\"50\">", (int)SCHED_MARGIN);
  print_difference(out, predicted, measured);
  sched_print(out, "; times in milliseconds; grey: reductions and steps</text>\n");
  sched_svg_legend(out, &above, 66);
  // One axis for both: the longer of the two.
  SchedFrame axis = predicted->makespan > measured->makespan ? above : below;
  sched_svg_axis(out, &axis, above.top - 6, below.bottom);
  print_figures(out, "predicted", predicted, above.top - 12);
  sched_svg_lanes(out, &above);
  print_figures(out, "measured", measured, below.top - 12);
  sched_svg_lanes(out, &below);
  sched_print(out, "</svg>\n");
}
