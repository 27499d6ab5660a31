#include <sched.h>

#include <vector>

#include "team.h"

namespace {

std::vector<int> cores;           // by rank
thread_local int placed_on = -1;  // the core this thread is pinned to

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  // Cannot fail for a core of the process's own; if it ever does the thread floats, as before.
  sched_setaffinity(0, sizeof set, &set);
  placed_on = core;
}

}  // namespace

namespace pds {

void place_thread(int rank) {
  if (rank == 0 || rank >= static_cast<int>(cores.size()) || placed_on == cores[rank]) return;
  pin(cores[rank]);
}

}  // namespace pds

// From now on rank r of every team runs on ranked_cores[r]. No team may be running.
extern "C" void pds_pin_threads(const int32_t* ranked_cores, int64_t count) {
  cores.assign(ranked_cores, ranked_cores + count);
  pds::run_team([](const pds::Team&) {});
}
