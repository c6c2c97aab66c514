// sched_svg - a schedule's timeline as an SVG image.
//
//     title                                       F  B   stage 0 ... 7
//     caption: costs, bubbles
//     rank 0  [0][1][2][3]///////[ 0 ][4][ 1 ]     one lane a rank; idle time is hatched;
//     rank 1     [0][1][2]///[ 0 ][3]              the halves of an overlapped pair share a lane
//             |0      |5      |10
#include "parallel/sched_draw.h"

// ---- words -----------------------------------------------------------------------------------

void sched_print_escaped(const SchedOut *out, const char *text) {
  for (; *text; text++) {
    switch (*text) {
    case '&': sched_print(out, "&amp;"); break;
    case '<': sched_print(out, "&lt;"); break;
    case '>': sched_print(out, "&gt;"); break;
    case '"': sched_print(out, "&quot;"); break;
    default: sched_print(out, "%c", *text);
    }
  }
}

void sched_print_title(const SchedOut *out, const Sched *sched) {
  sched_print_escaped(out, sched->name);
  sched_print(out, ": %d rank%s, ", sched->ranks, sched->ranks == 1 ? "" : "s");
  if (sched->chunks > 1) sched_print(out, "%d stages each, ", sched->chunks);
  sched_print(out, "%d microbatch%s", sched->mbs, sched->mbs == 1 ? "" : "es");
}

void sched_print_caption(const SchedOut *out, const SchedSim *sim, const SchedCosts *costs) {
  double ideal = sim->makespan - sim->makespan_bubble;
  if (costs->price)
    sched_print(out, "measured costs");
  else
    sched_print(out, "F = %g, I = %g, W = %g", costs->F, costs->I, costs->W);
  if (costs->overlap >= 0) sched_print(out, ", pair %g", costs->overlap);
  if (costs->hop > 0) sched_print(out, ", hop %g", costs->hop);
  sched_print(out, "; step %g, bubble %g (%.1g%% over ideal), between steps %g", sim->makespan,
              sim->makespan_bubble, ideal > 0 ? 100 * sim->makespan_bubble / ideal : 0,
              sim->span_bubble);
}

// ---- geometry --------------------------------------------------------------------------------

enum { LANE = 26, PITCH = 30, MARGIN = SCHED_MARGIN, NAME = 58 };

double sched_shortest(const Sched *sched, const SchedSim *sim) {
  double least = sim->makespan;
  for (int rank = 0; rank < sched->ranks; rank++) {
    const SchedSpan *span = sim->span + sim->first[rank];
    for (int i = 0; i < sched->row[rank].count; i++) {
      double time = span[i].end - span[i].start;
      bool counts = action_resource(sched->row[rank].action[i].kind) == USES_COMPUTE;
      if (counts && time > 0 && time < least) least = time;
    }
  }
  return least;
}

SchedFrame sched_frame(const Sched *sched, const SchedSim *sim, const SchedCosts *costs,
                       double top) {
  enum { NARROWEST = 700, WIDEST = 8000, CELL = 20, CELL_LEAST = 16, SCREEN = 1320 };
  double time = sim->makespan > 0 ? sim->makespan : 1, least = sched_shortest(sched, sim);
  // The shortest action as wide as is pleasant, narrower where that makes it fit on a screen.
  double width = least > 0 ? CELL * time / least : NARROWEST;
  if (width > SCREEN && least > 0)
    width = CELL_LEAST * time / least > SCREEN ? CELL_LEAST * time / least : SCREEN;
  if (width < NARROWEST) width = NARROWEST;
  if (width > WIDEST) width = WIDEST;
  return (SchedFrame){.sched = sched,
                      .sim = sim,
                      .costs = costs,
                      .left = MARGIN + NAME,
                      .top = top,
                      .scale = width / time,
                      .lane = LANE,
                      .pitch = PITCH,
                      .right = MARGIN + NAME + width,
                      .bottom = top + PITCH * sched->ranks};
}

// ---- parts -----------------------------------------------------------------------------------

void sched_svg_style(const SchedOut *out) {
  sched_print(out, "<style>"
                   ".tl text{font:11px system-ui,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif;"
                   "fill:#2b2f36}"
                   ".tl .title{font-size:17px;font-weight:600}.tl .dim{fill:#69707d}"
                   ".tl .a text{text-anchor:middle;fill:#1d2733}.tl .a .w{fill:#fff}"
                   ".tl .grid{stroke:#d9dde3;stroke-width:1}.tl .mid{text-anchor:middle}"
                   ".tl .end{text-anchor:end}"
                   "</style>\n"
                   "<defs><pattern id=\"idle\" width=\"6\" height=\"6\" "
                   "patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">"
                   "<rect width=\"6\" height=\"6\" fill=\"#f4f5f7\"/>"
                   "<line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\" stroke=\"#dfe2e7\" "
                   "stroke-width=\"2\"/></pattern></defs>\n");
}

int sched_pair_half(const Sched *sched, const SchedSim *sim, int rank, int index) {
  const Action *action = sched->row[rank].action;
  const SchedSpan *span = sim->span + sim->first[rank];
  int marker = index >= 1 && action[index - 1].kind == ACTION_OVERLAP_F_B   ? index - 1
               : index >= 2 && action[index - 2].kind == ACTION_OVERLAP_F_B ? index - 2
                                                                            : -1;
  if (marker < 0 || marker + 2 >= sched->row[rank].count) return 0;
  bool runs_at_once = span[marker + 2].start < span[marker + 1].end;
  return runs_at_once ? index - marker : 0;
}

static void print_action(const SchedOut *out, const SchedFrame *frame, int rank, int index) {
  Action action = frame->sched->row[rank].action[index];
  SchedSpan span = frame->sim->span[frame->sim->first[rank] + index];
  SchedColour colour = sched_colour(frame->sched, action.kind, action.stage);
  int half = sched_pair_half(frame->sched, frame->sim, rank, index);
  double x = frame->left + span.start * frame->scale, y = frame->top + rank * frame->pitch;
  double width = (span.end - span.start) * frame->scale, height = frame->lane;
  if (half) height = frame->lane / 2 - 0.5;
  if (half == 2) y += frame->lane / 2 + 0.5;
  double gap = width > 6 ? 1 : width > 2 ? 0.5 : 0;
  sched_print(out, "<g class=\"a m%d\"><title>%s on rank %d, %g to %g</title>", action.mb,
              sched_name(action).text, rank, span.start, span.end);
  sched_print(out, "<rect x=\"%.2g\" y=\"%.1g\" width=\"%.2g\" height=\"%.1g\" rx=\"%d\" ", x, y,
              width - gap, height, width > 6 ? 2 : 0);
  sched_print(out, "fill=\"rgb(%d,%d,%d)\"/>", colour.r, colour.g, colour.b);
  if (width >= 6.6 * sched_digits(action.mb) + 2)
    sched_print(out, "<text%s x=\"%.2g\" y=\"%.1g\">%d</text>",
                colour.text_is_light ? " class=\"w\"" : "", x + (width - gap) / 2,
                y + height / 2 + 4, action.mb);
  sched_print(out, "</g>\n");
}

// A reduction or a step that takes time: a plain grey block.
static void print_group(const SchedOut *out, const SchedFrame *frame, int rank, int index) {
  SchedSpan span = frame->sim->span[frame->sim->first[rank] + index];
  if (span.end <= span.start) return;
  sched_print(out,
              "<g><title>%s on rank %d, %g to %g</title><rect x=\"%.2g\" y=\"%.1g\" "
              "width=\"%.2g\" height=\"%.1g\" fill=\"#aab0ba\"/></g>\n",
              sched_name(frame->sched->row[rank].action[index]).text, rank, span.start, span.end,
              frame->left + span.start * frame->scale, frame->top + rank * frame->pitch,
              (span.end - span.start) * frame->scale, frame->lane);
}

void sched_svg_lanes(const SchedOut *out, const SchedFrame *frame) {
  for (int rank = 0; rank < frame->sched->ranks; rank++) {
    double y = frame->top + rank * frame->pitch;
    sched_print(out, "<text class=\"end\" x=\"%g\" y=\"%g\">rank %d</text>", frame->left - 10,
                y + frame->lane / 2 + 4, rank);
    sched_print(out, "<rect x=\"%g\" y=\"%g\" width=\"%.1g\" height=\"%g\" fill=\"url(#idle)\"/>\n",
                frame->left, y, frame->right - frame->left, frame->lane);
    for (int i = 0; i < frame->sched->row[rank].count; i++) {
      ActionKind kind = frame->sched->row[rank].action[i].kind;
      if (action_resource(kind) == USES_COMPUTE)
        print_action(out, frame, rank, i);
      else if (action_resource(kind) == USES_GROUP || kind == ACTION_STEP)
        print_group(out, frame, rank, i);
    }
  }
}

void sched_svg_axis(const SchedOut *out, const SchedFrame *frame, double top, double bottom) {
  double time = frame->sim->makespan, width = frame->right - frame->left;
  double step = sched_tick(time, width > 160 ? (int)(width / 80) : 2);
  for (int k = 0; k * step <= time * (1 + 1e-9); k++) {
    double x = frame->left + k * step * frame->scale;
    sched_print(out, "<line class=\"grid\" x1=\"%.2g\" y1=\"%g\" x2=\"%.2g\" y2=\"%g\"/>", x, top,
                x, bottom);
    sched_print(out, "<text class=\"dim mid\" x=\"%.2g\" y=\"%g\">%g</text>\n", x, bottom + 14,
                k * step);
  }
}

void sched_svg_legend(const SchedOut *out, const SchedFrame *frame, double y) {
  enum { SWATCH = 16, TILE = 22, LETTER = 6 };
  const Sched *sched = frame->sched;
  SchedLegend legend[SCHED_LEGENDS];
  double x = frame->left;
  sched_legend(sched, legend);
  for (int i = 0; i < SCHED_LEGENDS; i++) {
    if (!legend[i].is_used) continue;
    int length = sched_length(legend[i].words);
    SchedColour colour = sched_colour(sched, legend[i].kind, sched->stages / 3);
    sched_print(out, "<rect x=\"%g\" y=\"%g\" width=\"%d\" height=\"14\" rx=\"2\" ", x, y,
                (int)SWATCH);
    sched_print(out, "fill=\"rgb(%d,%d,%d)\"/><text x=\"%g\" y=\"%g\">%s</text>\n", colour.r,
                colour.g, colour.b, x + SWATCH + 6, y + 11, legend[i].words);
    x += SWATCH + 6 + LETTER * length + 18;
  }
  if (sched->stages == 1) return;
  int shown = sched->stages < 12 ? sched->stages : 12;
  sched_print(out, "<text class=\"dim\" x=\"%g\" y=\"%g\">stage</text>\n", x, y + 11);
  x += 36;
  for (int i = 0; i < shown; i++) {
    int stage = (int)((int64_t)i * (sched->stages - 1) / (shown - 1));
    SchedColour colour = sched_colour(sched, ACTION_F, stage);
    sched_print(out, "<rect x=\"%g\" y=\"%g\" width=\"%d\" height=\"14\" ", x, y, (int)TILE);
    sched_print(out, "fill=\"rgb(%d,%d,%d)\"/>", colour.r, colour.g, colour.b);
    sched_print(out, "<text class=\"mid\" x=\"%g\" y=\"%g\">%d</text>\n", x + TILE / 2.0, y + 11,
                stage);
    x += TILE;
  }
}

// ---- the image -------------------------------------------------------------------------------

void sched_draw_svg(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                    const SchedCosts *costs) {
  enum { TOP = 104 };
  SchedFrame frame = sched_frame(sched, sim, costs, TOP);
  double width = frame.right + MARGIN, height = frame.bottom + 28;
  sched_print(
      out,
      "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"tl\" width=\"%.1g\" height=\"%.1g\" "
      "viewBox=\"0 0 %.1g %.1g\">\n<title>",
      width, height, width, height);
  sched_print_title(out, sched);
  sched_print(out, "</title>\n");
  sched_svg_style(out);
  sched_print(out, "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n");
  sched_print(out, "<text class=\"title\" x=\"%d\" y=\"30\">", MARGIN);
  sched_print_title(out, sched);
  sched_print(out, "</text>\n<text class=\"dim\" x=\"%d\" y=\"50\">", MARGIN);
  sched_print_caption(out, sim, costs);
  sched_print(out, "</text>\n");
  sched_svg_legend(out, &frame, 66);
  sched_svg_axis(out, &frame, TOP - 6, frame.bottom);
  sched_svg_lanes(out, &frame);
  sched_print(out, "</svg>\n");
}
