// A world of one rank: what launchers say, groups and meshes when memory runs out. Several ranks
// are in tests/ranks.c.
#include "parallel/comm.h"
#include "parallel/mesh.h"

#include "tests/allocs.h"
#include "tests/files.h"
#include "tests/tests.h"

#include <stdlib.h>
#include <string.h>

static Comm *world;

static const char *const variables[] = {"OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALRANKID",
                                        "MPI_LOCALNRANKS",
                                        "PMIX_RANK",
                                        "SLURM_PROCID",
                                        "SLURM_LOCALID",
                                        "SLURM_NODEID",
                                        "SLURM_STEP_ID",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_STEP_TASKS_PER_NODE",
                                        "RILLE_STALL_TIMEOUT",
                                        "RILLE_FAKE_CLOCK",
                                        "RILLE_FAKE_SLOW",
                                        "RILLE_FAKE_LINK",
                                        "RILLE_TEST_PIECE",
                                        "RILLE_MPI"};

static void forget(void) {
  for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) unsetenv(variables[i]);
}

static void setup(void) {
  forget();
  ck_assert_int_eq(comm_world(&world), ST_OK);
  ck_assert_int_eq(world->size, 1);
}

// ---- launchers

// Sets "NAME=value NAME=value" and reads the launch.
static Launch launch_of(const char *settings) {
  char words[512];
  Launch launch;
  forget();
  strcpy(words, settings);
  for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) {
    char *value = strchr(word, '=');
    *value = 0;
    setenv(word, value + 1, 1);
  }
  launch_read(&launch);
  forget();
  return launch;
}

START_TEST(launchers_are_known_by_their_variables) {
  static const struct {
    const char *settings, *launcher, *plugin;
    int rank, world, local_rank, local_world;
  } cases[] = {
      {"PATH_=x", NULL, NULL, 0, 1, 0, 1},
      {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
       "OMPI_COMM_WORLD_LOCAL_SIZE=2",
       "mpirun of Open MPI", "openmpi", 3, 8, 1, 2},
      {"PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4", "mpiexec of MPICH", "mpich", 1,
       4, 1, 4},
      {"PMI_RANK=5 PMI_SIZE=6 SLURM_PROCID=5 SLURM_LOCALID=2 SLURM_STEP_NUM_TASKS=6 "
       "SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=3(x2) SLURM_STEP_ID=0",
       "srun --mpi=pmi2", "mpich", 5, 6, 2, 3},
      {"PMIX_RANK=2 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_ID=0 "
       "SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=1(x2),2",
       "srun --mpi=pmix", "openmpi", 2, 4, 0, 2},
      {"SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_ID=0 SLURM_NODEID=0 "
       "SLURM_STEP_TASKS_PER_NODE=4",
       "srun", NULL, 1, 4, 1, 4},
      {"SLURM_PROCID=0 SLURM_NTASKS=4", NULL, NULL, 0, 1, 0, 1}, // a batch script
      {"OMPI_COMM_WORLD_RANK=x OMPI_COMM_WORLD_SIZE=8", NULL, NULL, 0, 1, 0, 1},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Launch launch = launch_of(cases[i].settings);
    ck_assert_pstr_eq(launch.launcher, cases[i].launcher);
    ck_assert_pstr_eq(launch.plugin, cases[i].plugin);
    ck_assert_int_eq(launch.rank, cases[i].rank);
    ck_assert_int_eq(launch.world, cases[i].world);
    ck_assert_int_eq(launch.local_rank, cases[i].local_rank);
    ck_assert_int_eq(launch.local_world, cases[i].local_world);
  }
}
END_TEST

START_TEST(values_that_mean_nothing_are_refused) {
  static const char *const cases[][3] = {
      {"RILLE_STALL_TIMEOUT", "2.5", "-1"},  {"RILLE_FAKE_CLOCK", "1:-0.5,3:2", "1:"},
      {"RILLE_FAKE_SLOW", "2:1.5", "2:0.9"}, {"RILLE_FAKE_LINK", "0.25", "fast"},
      {"RILLE_TEST_PIECE", "1000", "0"},     {"RILLE_MPI", "mpich", "lam"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    forget();
    setenv(cases[i][0], cases[i][1], 1);
    ck_assert_int_eq(launch_environment(), ST_OK);
    setenv(cases[i][0], cases[i][2], 1);
    ck_assert_int_eq(launch_environment(), ST_EVALUE);
    ck_assert(test_message_has(cases[i][0]));
  }
  forget();
}
END_TEST

// ---- memory

static Status split(void) {
  Comm *group;
  TRY(comm_split(world, 0, 0, &group));
  comm_free(group);
  return ST_OK;
}

static Status mesh(void) {
  int size[MESH_AXES] = {1, 1, 1};
  Mesh *out;
  char words[64];
  TRY(mesh_new(world, size, &out));
  Status status = mesh_warnings(out, 1, words, sizeof words);
  mesh_free(out);
  return status;
}

static Status collectives(void) {
  double x[4] = {1, 2, 3, 4}, y[4], offset, error;
  const char *line = "a";
  TRY(comm_all_reduce(world, x, 4, DT_F64, REDUCE_SUM));
  TRY(comm_reduce_scatter(world, x, y, 4, DT_F64));
  TRY(comm_all_to_all(world, x, y, sizeof x));
  TRY(comm_agree(world, &line, 1));
  TRY(comm_align_clocks(world, &offset, &error));
  ck_assert(x[3] == 4 && y[3] == 4 && offset == 0 && error == 0);
  return comm_barrier(world);
}

static Status message(void) {
  Comm *self;
  CommRequest *send, *recv;
  int a = 7, b = 0;
  TRY(comm_self(&self));
  Status status = comm_send(self, 0, CHANNEL_PAYLOAD, &a, sizeof a, NULL, &send);
  if (status == ST_OK) {
    status = comm_recv(self, 0, CHANNEL_PAYLOAD, &b, sizeof b, NULL, &recv);
    if (status != ST_OK) free(send); // alone, it would never be done
  }
  if (status == ST_OK) status = comm_wait(self, send);
  if (status == ST_OK) status = comm_wait(self, recv);
  if (status == ST_OK) ck_assert_int_eq(b, 7);
  comm_free(self);
  return status;
}

START_TEST(every_allocation_may_fail) {
  static Status (*const actions[])(void) = {split, mesh, collectives, message};
  for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
    for (int n = 1;; n++) {
      test_alloc_fail_at(n);
      Status status = actions[i]();
      bool has_failed = test_alloc_has_failed();
      test_alloc_fail_at(0);
      ck_assert_int_eq(status, has_failed ? ST_ENOMEM : ST_OK);
      if (has_failed) continue;
      ck_assert_int_gt(n, 3);
      break;
    }
}
END_TEST

START_TEST(a_message_to_oneself_of_two_sizes) {
  Comm *self;
  CommRequest *send, *recv;
  char a[8] = {0}, b[4];
  ck_assert_int_eq(comm_self(&self), ST_OK);
  ck_assert_int_eq(comm_recv(self, 0, CHANNEL_HEADER, b, 4, NULL, &recv), ST_OK);
  ck_assert_int_eq(comm_send(self, 0, CHANNEL_HEADER, a, 8, NULL, &send), ST_OK);
  ck_assert_int_eq(comm_wait(self, send), ST_ECOMM);
  ck_assert_int_eq(comm_wait(self, recv), ST_ECOMM);
  comm_free(self);
}
END_TEST

START_TEST(a_short_message_says_its_size) {
  Comm *self;
  CommRequest *send, *recv;
  char a[8] = "abcd", b[6] = "......";
  size_t got = 99;
  ck_assert_int_eq(comm_self(&self), ST_OK);
  for (int is_first = 0; is_first < 2; is_first++) { // the receive, or the send
    if (is_first) ck_assert_int_eq(comm_recv_short(self, 0, CHANNEL_HEADER, b, 6, &got, &recv), 0);
    ck_assert_int_eq(comm_send(self, 0, CHANNEL_HEADER, a, 3, NULL, &send), ST_OK);
    if (!is_first) ck_assert_int_eq(comm_recv_short(self, 0, CHANNEL_HEADER, b, 6, &got, &recv), 0);
    ck_assert_int_eq(comm_wait(self, send), ST_OK);
    ck_assert_int_eq(comm_wait(self, recv), ST_OK);
    ck_assert_uint_eq(got, 3);
    ck_assert_int_eq(memcmp(b, "abc...", 6), 0);
    got = 99;
  }
  ck_assert_int_eq(comm_recv_short(self, 0, CHANNEL_HEADER, b, 6, &got, &recv), ST_OK);
  ck_assert_int_eq(comm_send(self, 0, CHANNEL_HEADER, a, 8, NULL, &send), ST_OK);
  ck_assert_int_eq(comm_wait(self, send), ST_ECOMM);
  ck_assert_int_eq(comm_wait(self, recv), ST_ECOMM);
  comm_free(self);
}
END_TEST

Suite *comm_suite(void);
Suite *comm_suite(void) {
  Suite *suite = suite_create("comm");
  TCase *tests = tcase_create("one rank");
  tcase_add_checked_fixture(tests, setup, NULL);
  tcase_add_test(tests, launchers_are_known_by_their_variables);
  tcase_add_test(tests, values_that_mean_nothing_are_refused);
  tcase_add_test(tests, every_allocation_may_fail);
  tcase_add_test(tests, a_message_to_oneself_of_two_sizes);
  tcase_add_test(tests, a_short_message_says_its_size);
  suite_add_tcase(suite, tests);
  return suite;
}
