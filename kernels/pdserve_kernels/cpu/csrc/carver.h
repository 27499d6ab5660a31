// Pieces of a workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pds {

// Hands out pieces of memory; from 0 on it only adds up their sizes.
struct Carver {
  uintptr_t next;

  template <typename T>
  T* take(int64_t count) {
    uintptr_t piece = next;
    next += (static_cast<uintptr_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
};

}  // namespace pds
