// A kernel is written for a team of threads that all run it: each does its share, none starts threads.
// So kernels compose: several run one after another in one parallel region, a barrier between them.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace pds {

struct Range {
  int64_t begin, end;
};

struct Team {
  int rank, size;

  // Returns when all threads of the team have come here; what they wrote is then visible.
  void barrier() const {
#pragma omp barrier
  }

  // This thread's part of [0, count), in whole multiples of `step` but for the last. Static: which
  // thread does what never depends on timing.
  Range share(int64_t count, int64_t step = 1) const {
    int64_t units = (count + step - 1) / step;
    int64_t begin = units * rank / size, end = units * (rank + 1) / size;
    return {std::min(count, begin * step), std::min(count, end * step)};
  }
};

// Pins the calling thread to its rank's core, if pds_pin_threads gave it one. Done in every team,
// because OpenMP ends threads that a smaller team leaves over and starts new ones later. Rank 0 is the
// engine's thread, which stays free to move: threads started in between inherit its cores.
void place_thread(int rank);

// Runs body(team) on all threads that OpenMP has, which are torch's.
template <typename Body>
void run_team(const Body& body) {
#pragma omp parallel
  {
    place_thread(omp_get_thread_num());
    body(Team{omp_get_thread_num(), omp_get_num_threads()});
  }
}

}  // namespace pds
