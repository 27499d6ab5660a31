// The ranks of one model in memory that they share: each has two slots for what it tells the others,
// used in turn, and a flag that says how often it has filled one.
//
// An exchange: a rank fills a slot, raises its flag to the exchange's number and waits for the flags
// of all others; then it reads their slots. Two slots are enough: a rank that fills the slot of
// exchange n + 2, which is that of n, has seen all flags at n + 1, and a rank raises its flag to
// n + 1 when it has read what it wants of n.
#pragma once

#include <atomic>

#include "isa.h"

namespace pds {

constexpr int MAX_RANKS = 8;

struct alignas(64) RankFlag {
  std::atomic<uint32_t> exchange;  // wraps around
  std::atomic<uint32_t> num_sleepers;
};

// One rank's view. One thread at a time may use it, but for what is const.
struct Group {
  RankFlag* flags;  // [size]
  uint8_t* slots;   // [size][2][slot_bytes]
  int64_t slot_bytes, rank, size, timeout_ns;
  int64_t exchange;  // the number of the last one
  int64_t missing;   // the rank that did not come in time: no exchange succeeds any more; or -1

  bool has_failed() const { return missing >= 0; }
  // Where this rank writes before an exchange, and what a rank has written, after it.
  template <typename T>
  T* own_slot() const {
    return reinterpret_cast<T*>(slot(rank, exchange + 1));
  }
  template <typename T>
  const T* slot_of(int64_t other) const {
    return reinterpret_cast<const T*>(slot(other, exchange));
  }

 private:
  uint8_t* slot(int64_t which, int64_t number) const {
    return slots + (2 * which + number % 2) * slot_bytes;
  }
};

// Tells the other ranks that the slot is filled and waits for theirs; false if one does not come.
bool exchange(Group& group);

// The ranks' fp32 numbers, added as a binary tree: neighbours first.
struct RankSums {
  const float* parts[MAX_RANKS];
  int64_t size;

  explicit RankSums(const Group& group) : size(group.size) {
    for (int64_t rank = 0; rank < size; ++rank) parts[rank] = group.slot_of<float>(rank);
  }
  // The sums from i on, of which there are `count`.
  PDS_INLINE F32 at(int64_t i, int64_t count) const {
    switch (size) {
      case 1: return tree<0, 1>(i, count);
      case 2: return tree<0, 2>(i, count);
      case 4: return tree<0, 4>(i, count);
      default: return tree<0, 8>(i, count);
    }
  }

 private:
  template <int FIRST, int COUNT>
  PDS_INLINE F32 tree(int64_t i, int64_t count) const {
    if constexpr (COUNT == 1)
      return load(parts[FIRST] + i, count);
    else
      return add(tree<FIRST, COUNT / 2>(i, count), tree<FIRST + COUNT / 2, COUNT / 2>(i, count));
  }
};

}  // namespace pds
