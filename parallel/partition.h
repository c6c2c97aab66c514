// partition - units (the smallest parts of a model that stay together) to pipeline stages.
//
//     units   wte h.0 h.1 h.2 h.3 h.4 ln_f head
//     stages  |--- 0 ---|-- 1 --|-- 2 --|- 3 -|       first = {0, 3, 5, 6, 8}
//
// A split is contiguous. first[stages + 1] holds the first unit of each stage, then the number of
// units; a stage with first[s] == first[s + 1] is empty.
//
// What is minimised, in this order:
//   1  the largest sum of costs over the stages of one rank: it decides how long a microbatch takes
//      in the steady state
//   2  the largest cost of a stage: it decides how long the pipeline takes to fill
//   3  with one stage a rank, the sum of the squares of the costs of the stages
// under the limit: no rank keeps more bytes than it may.
//
// With one stage a rank that is found exactly, by dynamic programming. With several, a search with
// bounds starts from a good split and usually runs to its end; where it does not, PartitionFigures
// says so. Everything is a pure function of its arguments, the same on every rank.
#ifndef RILLE_PARALLEL_PARTITION_H
#define RILLE_PARALLEL_PARTITION_H

#include "parallel/sched.h"

#ifdef __cplusplus
extern "C" {
#endif

// What is to be split. Embedding and head are units like any other, with costs of their own.
typedef struct PartitionCase {
  int units, stages, ranks;
  const int *holder;   // [stages] the rank of each stage; NULL: stage s on rank s mod ranks
  const double *cost;  // [units] seconds of a microbatch (F + I + W), or parameters; NULL: 1 each
  const double *kept;  // [units] bytes that a microbatch keeps from F to the backward; NULL: 0
  const double *state; // [units] bytes of parameters, gradients, optimizer; NULL: 0
  const int *live;     // [stages] microbatches kept at most (partition_live); NULL: 1 each
  double limit;        // bytes that a rank may keep; 0: no limit
} PartitionCase;

// What a split costs.
typedef struct PartitionFigures {
  double rank_cost;  // largest sum over the stages of a rank
  double stage_cost; // largest of a stage
  double total;
  double bytes; // largest of a rank
  bool is_optimal;
} PartitionFigures;

// As many units a stage, give or take one. Errors: EVALUE: more stages than units.
Status partition_uniform(const PartitionCase *c, int *first);

// The best split by cost, none of its stages empty. figures may be NULL.
// Errors: EVALUE: more stages than units; a cost that is negative or not finite; no split within
// the limit.
Status partition_balanced(const PartitionCase *c, int *first, PartitionFigures *figures);

// A split by the number of units of each stage, count[n]; 0: an empty stage.
// Errors: EVALUE: not one count a stage, one below 0, or a sum that is not the number of units; the
// message has the split.
Status partition_given(const PartitionCase *c, const int *count, int n, int *first);

void partition_measure(const PartitionCase *c, const int *first, PartitionFigures *figures);

// live[stages]: how many microbatches of each stage are kept at once, at most. With several stages
// a rank they need not peak together, so their sum is an upper bound.
void partition_live(const Sched *sched, int *live);

#ifdef __cplusplus
}
#endif
#endif
