#include "group.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace pds {
namespace {

// A rank that comes this late is waited for without its core, which it may need.
constexpr int64_t SPIN_NS = 20'000;
constexpr int PAUSES_BETWEEN_LOOKS = 16;  // at the clock
// One who died before it woke us is noticed so late.
constexpr int64_t SLEEP_NS = 100'000'000;

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// Not FUTEX_PRIVATE: the others are other processes.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

bool has_come(const RankFlag& flag, uint32_t number) {
  return static_cast<int32_t>(flag.exchange.load(std::memory_order_acquire) - number) >= 0;
}

void sleep_until_come(RankFlag& flag, uint32_t number, int64_t deadline) {
  // Whoever raises the flag looks for sleepers afterwards, and we at the flag after this.
  flag.num_sleepers.fetch_add(1);
  while (true) {
    const uint32_t seen = flag.exchange.load();
    const int64_t left = deadline - now_ns();
    if (static_cast<int32_t>(seen - number) >= 0 || left <= 0) break;
    const timespec timeout{0, std::min(left, SLEEP_NS)};
    futex(flag.exchange, FUTEX_WAIT, seen, &timeout);
  }
  flag.num_sleepers.fetch_sub(1);
}

bool wait_for(RankFlag& flag, uint32_t number, int64_t timeout_ns) {
  const int64_t start = now_ns();
  do {
    for (int i = 0; i < PAUSES_BETWEEN_LOOKS; ++i) {
      if (has_come(flag, number)) return true;
      _mm_pause();
    }
  } while (now_ns() - start < SPIN_NS);
  sleep_until_come(flag, number, start + timeout_ns);
  return has_come(flag, number);
}

// Calls body(first, count) for the pieces of so many elements that fit a slot.
template <typename Body>
void for_each_piece(const Group& group, int64_t count, int64_t element_bytes, const Body& body) {
  const int64_t at_once = group.slot_bytes / element_bytes;
  for (int64_t first = 0; first < count && !group.has_failed(); first += at_once)
    body(first, std::min(at_once, count - first));
}

}  // namespace

bool exchange(Group& group) {
  if (group.has_failed()) return false;
  const auto number = static_cast<uint32_t>(group.exchange + 1);
  RankFlag& own = group.flags[group.rank];
  own.exchange.store(number);
  if (own.num_sleepers.load() > 0) futex(own.exchange, FUTEX_WAKE, INT_MAX, nullptr);
  for (int64_t rank = 0; rank < group.size; ++rank)
    if (!wait_for(group.flags[rank], number, group.timeout_ns)) {
      group.missing = rank;
      return false;
    }
  ++group.exchange;
  return true;
}

void sum(Group& group, const float* partial, float* out, int64_t count) {
  for_each_piece(group, count, sizeof(float), [&](int64_t first, int64_t size) {
    std::copy_n(partial + first, size, group.own_slot<float>());
    if (!exchange(group)) return;
    const RankSums sums(group);
    for (int64_t i = 0; i < size; i += LANES) {
      float lanes[LANES];
      store(lanes, sums.at(i, size - i));
      std::copy_n(lanes, std::min<int64_t>(LANES, size - i), out + first + i);
    }
  });
}

void gather(Group& group, const uint8_t* part, uint8_t* out, int64_t num_bytes) {
  for_each_piece(group, num_bytes, 1, [&](int64_t first, int64_t size) {
    std::copy_n(part + first, size, group.own_slot<uint8_t>());
    if (!exchange(group)) return;
    for (int64_t rank = 0; rank < group.size; ++rank)
      std::copy_n(group.slot_of<uint8_t>(rank), size, out + rank * num_bytes + first);
  });
}

void broadcast(Group& group, uint8_t* data, int64_t num_bytes) {
  for_each_piece(group, num_bytes, 1, [&](int64_t first, int64_t size) {
    if (group.rank == 0) std::copy_n(data + first, size, group.own_slot<uint8_t>());
    if (exchange(group)) std::copy_n(group.slot_of<uint8_t>(0), size, data + first);
  });
}

}  // namespace pds

extern "C" {

// Where one of these fails, group->missing says so.

// out [count]: the sums of all ranks' `partial`.
void pds_group_sum(pds::Group* group, const float* partial, float* out, int64_t count) {
  pds::sum(*group, partial, out, count);
}

// out [size][num_bytes]: all ranks' `part`.
void pds_group_gather(pds::Group* group, const uint8_t* part, uint8_t* out, int64_t num_bytes) {
  pds::gather(*group, part, out, num_bytes);
}

// data [num_bytes] becomes rank 0's.
void pds_group_broadcast(pds::Group* group, uint8_t* data, int64_t num_bytes) {
  pds::broadcast(*group, data, num_bytes);
}

}  // extern "C"
