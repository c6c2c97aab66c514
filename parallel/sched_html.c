// sched_html - a self-contained page: the timeline, the activation-memory curve of each rank below
// it on the same time axis, the figures. Pointing at an action shows its microbatch everywhere.
#include "parallel/sched_draw.h"

enum { CURVE = 34, CURVE_PITCH = 42 };

// ---- activation memory -----------------------------------------------------------------------

// When the live activations of a rank change: walks its list, of which F count from their start and
// B or W to their end.
typedef struct LiveWalk {
  const SchedFrame *frame;
  int rank, index;
  bool is_after; // the next change is the end of the action, its start was seen
  int64_t live;
  double time;
} LiveWalk;

static bool next_change(LiveWalk *walk) {
  const SchedRow *row = &walk->frame->sched->row[walk->rank];
  const SchedSpan *span = walk->frame->sim->span + walk->frame->sim->first[walk->rank];
  for (; walk->index < row->count; walk->index++, walk->is_after = false) {
    int does = action_properties(row->action[walk->index].kind);
    if (!walk->is_after && (does & KEEPS)) {
      walk->live++;
      walk->time = span[walk->index].start;
      walk->is_after = true;
      return true;
    }
    if (does & FREES) {
      walk->live--;
      walk->time = span[walk->index++].end;
      walk->is_after = false;
      return true;
    }
  }
  return false;
}

static void print_curve(const SchedOut *out, const SchedFrame *frame, int rank, double y,
                        int64_t highest) {
  const Sched *sched = frame->sched;
  double base = y + CURVE, unit = highest > 0 ? (double)CURVE / (double)highest : 0;
  int64_t peak = frame->sim->peak[rank];
  sched_print(out, "<text class=\"end\" x=\"%g\" y=\"%g\">rank %d</text>", frame->left - 10,
              y + CURVE / 2.0 + 4, rank);
  sched_print(out, "<path class=\"mem\" d=\"M%g %g", frame->left, base);
  // Changes at the same time are one step of the curve.
  LiveWalk walk = {.frame = frame, .rank = rank};
  for (bool more = next_change(&walk); more;) {
    LiveWalk step = walk;
    while ((more = next_change(&walk)) && walk.time <= step.time) step.live = walk.live;
    sched_print(out, "H%.2gV%.2g", frame->left + step.time * frame->scale,
                base - (double)step.live * unit);
  }
  sched_print(out, "H%.2gV%gZ\"/>\n", frame->right, base);
  double top = base - (double)peak * unit;
  sched_print(out, "<line class=\"peak\" x1=\"%g\" y1=\"%.2g\" x2=\"%.2g\" y2=\"%.2g\"/>",
              frame->left, top, frame->right, top);
  sched_print(out, "<text x=\"%.2g\" y=\"%.2g\">%g</text>\n", frame->right + 6, top + 4,
              (double)peak / sched->chunks);
}

// ---- figures ---------------------------------------------------------------------------------

static void print_row(const SchedOut *out, const char *name, double value, double ideal,
                      bool (*formula)(const SchedCase *, double *), const SchedCase *c) {
  double expected;
  sched_print(out, "<tr><th>%s</th><td>%g</td><td>%.1g%%</td><td>", name, value,
              ideal > 0 ? 100 * value / ideal : 0);
  if (formula && formula(c, &expected)) sched_print(out, "%g", expected);
  sched_print(out, "</td></tr>\n");
}

static void print_figures(const SchedOut *out, const SchedFrame *frame) {
  const Sched *sched = frame->sched;
  const SchedSim *sim = frame->sim;
  SchedCase c = sched_case(sched, frame->costs);
  bool holds = sched_has_formula(sched, frame->costs);
  double ideal = sim->makespan - sim->makespan_bubble;
  sched_print(out, "<table><tr><th></th><td>time</td><td>of ideal</td><td>by formula</td></tr>\n");
  print_row(out, "step (makespan)", sim->makespan, ideal, NULL, &c);
  print_row(out, "ideal", ideal, ideal, NULL, &c);
  print_row(out, "makespan bubble, one step seen alone", sim->makespan_bubble, ideal,
            holds ? sched->type->makespan : NULL, &c);
  print_row(out, "span bubble, left between steps without a barrier", sim->span_bubble, ideal,
            holds ? sched->type->span : NULL, &c);
  sched_print(out, "</table>\n");
}

// ---- the page --------------------------------------------------------------------------------

static void print_head(const SchedOut *out, const Sched *sched) {
  sched_print(out, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
                   "<meta name=\"viewport\" content=\"width=device-width\">\n<title>");
  sched_print_title(out, sched);
  sched_print(out, "</title>\n<style>\n"
                   "body{margin:0;background:#eef0f3;color:#2b2f36;"
                   "font:14px/1.45 system-ui,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif}\n"
                   "main{margin:24px auto;padding:20px 24px;background:#fff;border-radius:10px;"
                   "width:fit-content;max-width:calc(100vw - 88px);box-shadow:0 1px 4px #0002}\n"
                   "h1{font-size:20px;margin:0}p{margin:2px 0 12px;color:#69707d}\n"
                   ".scroll{overflow-x:auto}table{border-collapse:collapse;margin-top:14px}\n"
                   "th{font-weight:400;text-align:left;padding:2px 24px 2px 0}"
                   "td{text-align:right;padding:2px 0 2px 20px;font-variant-numeric:tabular-nums}"
                   "tr:first-child td{color:#69707d}\n"
                   ".mem{fill:#8fb3d9;fill-opacity:.55;stroke:#3860ac;stroke-width:1}"
                   ".peak{stroke:#3860ac;stroke-dasharray:3 4;stroke-width:1}\n"
                   ".tl.on .a{opacity:.22}.tl.on .a.lit{opacity:1}.a{cursor:pointer}\n"
                   "#tip{height:1.5em;font-variant-numeric:tabular-nums}\n"
                   "</style></head>\n<body><main>\n<h1>");
  sched_print_title(out, sched);
  sched_print(out, "</h1>\n<p>");
}

// A click keeps a microbatch lit; another, or one beside the actions, lets go.
static void print_script(const SchedOut *out) {
  sched_print(
      out, "<script>\n(function(){\n"
           "const svg=document.querySelector('.tl'),tip=document.getElementById('tip');\n"
           "const rest=tip.textContent;let kept=null;\n"
           "function light(g){\n"
           "  svg.querySelectorAll('.lit').forEach(x=>x.classList.remove('lit'));\n"
           "  svg.classList.toggle('on',!!g);\n"
           "  tip.textContent=g?g.querySelector('title').textContent:rest;\n"
           "  if(g)svg.querySelectorAll('.'+g.classList[1]).forEach(x=>x.classList.add('lit'));\n"
           "}\n"
           "svg.addEventListener('mouseover',e=>{if(!kept)light(e.target.closest('.a'))});\n"
           "svg.addEventListener('mouseleave',()=>{if(!kept)light(null)});\n"
           "svg.addEventListener('click',e=>{const g=e.target.closest('.a');"
           "kept=kept===g?null:g;light(kept)});\n"
           "})();\n</script>\n");
}

void sched_draw_html(const SchedOut *out, const Sched *sched, const SchedSim *sim,
                     const SchedCosts *costs) {
  enum { TOP = 34, PEAK_LABEL = 60 };
  SchedFrame frame = sched_frame(sched, sim, costs, TOP);
  double curves = frame.bottom + 56, bottom = curves + CURVE_PITCH * sched->ranks;
  double width = frame.right + PEAK_LABEL, height = bottom + 24;
  int64_t highest = 0;
  print_head(out, sched);
  sched_print_caption(out, sim, costs);
  sched_print(out,
              "</p>\n<div class=\"scroll\"><svg class=\"tl\" width=\"%.1g\" height=\"%.1g\">\n",
              width, height);
  sched_svg_style(out);
  sched_svg_legend(out, &frame, 4);
  sched_svg_axis(out, &frame, TOP - 4, frame.bottom);
  sched_svg_lanes(out, &frame);
  sched_print(out,
              "<text x=\"%g\" y=\"%g\">live activations, in microbatches of a whole rank; "
              "the dashed line is the peak</text>\n",
              frame.left, curves - 14);
  sched_svg_axis(out, &frame, curves - 6, bottom);
  for (int rank = 0; rank < sched->ranks; rank++)
    if (sim->peak[rank] > highest) highest = sim->peak[rank];
  for (int rank = 0; rank < sched->ranks; rank++)
    print_curve(out, &frame, rank, curves + CURVE_PITCH * rank, highest);
  sched_print(out, "</svg></div>\n<p id=\"tip\">Point at an action to follow its microbatch; click "
                   "to keep it.</p>\n");
  print_figures(out, &frame);
  print_script(out);
  sched_print(out, "</main></body></html>\n");
}
