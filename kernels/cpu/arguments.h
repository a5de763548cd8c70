// The arguments of a call as Python packs them (native/call.py): integers, pointers and doubles of 8 bytes each.
#pragma once
#include <cstdint>
#include <cstring>

namespace k3 {

struct Arguments {
  const char* at;
  template <class T>
  T take() {
    static_assert(sizeof(T) == 8, "every argument has 8 bytes");
    T value;
    std::memcpy(&value, at, 8);
    at += 8;
    return value;
  }
  operator int64_t() { return take<int64_t>(); }
  operator double() { return take<double>(); }
  template <class T>
  operator T*() {
    return take<T*>();
  }
};

}  // namespace k3
