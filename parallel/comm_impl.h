// comm_impl - what the comm files share and nobody else needs.
#ifndef RILLE_PARALLEL_COMM_IMPL_H
#define RILLE_PARALLEL_COMM_IMPL_H

#include "parallel/comm.h"

#include <pthread.h>
#include <stdatomic.h>

enum { WORDS = 48 }; // room for what a rank is doing

// A page that the ranks of a node share: what its rank is doing, and by which it is woken.
typedef struct CommPage {
  char doing[WORDS];
  _Alignas(128) _Atomic uint32_t bell; // counts what has been sent to it
  _Atomic uint32_t is_asleep;          // in a wait, until the bell is rung
} CommPage;

// What a CommNotice says.
enum {
  NOTICE_ASK,     // are you alive?
  NOTICE_ALIVE,   // the answer, also of a rank that has left
  NOTICE_LEFT,    // ... its script has ended
  NOTICE_FAILING, // the sender is about to report a failure and to end the job
  NOTICE_VICTIM,  // the sender has failed too, later, or waits for the end (hash 0)
};

// What this rank knows about another.
typedef struct CommPeer {
  double asked_at;        // last question; 0: never
  double heard_at;        // last answer; 0: never
  CommNotice said;        // of the last answer
  double left_at;         // 0: it has not left
  bool is_failing;        // it has failed
  bool is_victim;         // ... after it knew of another's failure: it will not report
  uint64_t failing_words; // their hash
} CommPeer;

// What the process is doing: written by the main thread, read by the watchdog too.
typedef struct CommLife {
  pthread_mutex_t lock; // of the words
  char *doing;          // [WORDS]; in a CommPage
  char own_words[WORDS], waiting_for[WORDS];
  int row;        // descriptor of that page's file
  int64_t row_at; // where it begins there
  uint32_t heard_bell;
  char coordinates[WORDS];
  _Atomic double beat; // when it last worked: a poll between kernels, an action, a message done
  _Atomic double turn; // when it last took a turn in a wait
  double resumed_at;   // when it last found, while waiting, that the process had been stopped
  _Atomic bool is_waiting;
  int waits_for; // rank of the world, -1: any
  double
      chain_beat; // while waiting: when the ranks waited for, or those they wait for, last worked
  int root;       // ... the end of that chain; -1: unknown
  char root_doing[WORDS];
  double polled_at;
  _Atomic double timeout; // seconds without a sign of life
  pthread_t watchdog;
  pthread_cond_t ending; // wakes the watchdog
  bool has_watchdog;
  _Atomic bool is_ending;
  _Atomic double abort_at; // when the transport was asked to end the job; 0: not yet
  int abort_code;
} CommLife;

// The poll hook and an exit handler get no argument: so what they serve is the one record of the
// process.
typedef struct CommProcess {
  Comm *world;   // NULL until opened
  Comm *leaving; // of all ranks, for the barrier at the end alone
  const CommTransport *transport;
  Launch launch;
  CommPlace *place;            // [world->size]
  CommPeer *peer;              // [world->size]
  Comm *groups;                // all, by Comm.next
  int64_t next_id;             // of a group
  CommCollective *collectives; // under way, in order of their start
  bool shares_cores;           // ranks outnumber cores: who waits sleeps
  bool has_bells;              // ... until it is rung
  CommPage **page;             // [world->size]; NULL without bells
  bool has_left;
  int n_inside; // calls of the transport under way
  Status lost;  // by which the job is lost (inv. 5 of comm.h); ST_OK: it is not
  KeptStatus lost_words;
  int exit_code;
  double somebody_fails; // since when another rank reports, and this one is a victim; 0: none does
  double fake_clock, fake_slow;
  CommLife life;
} CommProcess;
CommProcess *comm_process(void);

// ---- comm.c

// Records that the job is lost by the failure at hand, and returns it.
Status comm_lose(Status status);
// Moves everything on without counting as work.
void comm_progress(void);
// Takes in notices alone: what a failing rank still does.
void comm_listen(void);
void comm_say(int to, const CommNotice *notice);
void comm_abort(int code);
Status comm_group_new(const Comm *like, int64_t id, int rank, int size, const int *member,
                      Comm **out);
// Waits for n requests of the group, each with the peer it is from or to; NULL ones are skipped.
// Every request is gone afterwards, or the job is lost.
Status comm_wait_all(Comm *comm, CommRequest **requests, const int *peers, int n, const char *what);

// ---- comm_reduce.c

// Takes one step of every collective that is first of its group.
void comm_collectives_advance(void);
// Completes what was started on the group, so that a blocking collective finds its turn.
Status comm_collectives_drain(Comm *comm);
// The group is about to be freed: what is under way on it will never be done.
void comm_collectives_forget(const Comm *comm);

// ---- comm_life.c

void comm_life_begin(void);
void comm_life_end(void);
void comm_beat(void);
void comm_notice(int from, const CommNotice *notice);

// ---- comm_bell.c

// This process's page, of rank `rank`; NULL: it has none. Its file and where it begins there.
CommPage *comm_page_share(int rank, int *row, int64_t *at);
// Opens the file of a page of a rank on this node; -1: it cannot be seen.
int comm_page_open(const CommPlace *place, int flags);
// Agrees on whether all ranks ring. Collective over the world.
Status comm_bells_hang(void);
// Sleeps until this rank is rung, or for so many seconds; returns at once if it has been rung since
// the last call. False: it may not sleep, since there are no bells or something moves on only where
// it looks.
bool comm_sleep(double at_most);

// ---- comm_launch.c

// Opens the transport that the launcher's variables name. Errors: ECOMM, with what to do.
Status comm_transport_open(const Launch *launch, const CommTransport **out);
// "rank%2", "rank/2" or a word, for this rank; NULL if the variable is not set.
const char *comm_fake_node(int rank, char *buffer, size_t size);
// The number for this rank in "rank:number,..." or "number" alone; fallback if there is none.
double comm_fake_number(const char *variable, int rank, double fallback);

#endif
