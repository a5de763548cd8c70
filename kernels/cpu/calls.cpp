// Calls of C functions one after the other: what a pass over few rows does, once its addresses are known.
//
//   function, answers, count, argument x count    function, answers, ...    words of 8 bytes
//
// An argument is a pointer or an integer. Such are passed alike, so their number is all that a call's type is about.
// Of a function that answers, 0 says that it is done. Inductor's throw what they find wrong.
#include <cstdio>
#include <exception>
#include <utility>

#include "arguments.h"
#include "vectors.h"

namespace k3 {
namespace {

constexpr int MOST = 63;  // arguments; program.py has the same number

template <class Result, size_t... I>
Result call(int64_t function, const int64_t* args, std::index_sequence<I...>) {
  return reinterpret_cast<Result (*)(decltype(int64_t(I))...)>(function)(args[I]...);
}

typedef int64_t (*Caller)(int64_t, int64_t, const int64_t*);

struct Callers {
  Caller of[MOST + 1];
};

template <size_t... N>
constexpr Callers callers(std::index_sequence<N...>) {
  return {{[](int64_t f, int64_t answers, const int64_t* a) -> int64_t {
    if (answers) return call<int64_t>(f, a, std::make_index_sequence<N>{});
    call<void>(f, a, std::make_index_sequence<N>{});
    return 0;
  }...}};
}

constexpr Callers CALLERS = callers(std::make_index_sequence<MOST + 1>{});

}  // namespace
}  // namespace k3

// The words, how many they are, room for a message, its size. 0, or how many calls were begun up to one that failed.
K3_EXPORT int64_t k3_calls(const char* packed) {
  k3::Arguments of{packed};
  const int64_t* at = of;
  const int64_t* end = at + int64_t(of);
  char* message = of;
  const int64_t room = of;
  for (int64_t begun = 1; at < end; begun++) {
    try {
      if (const int64_t said = k3::CALLERS.of[at[2]](at[0], at[1], at + 3)) {
        std::snprintf(message, room, "it answered %lld", (long long)said);
        return begun;
      }
    } catch (const std::exception& error) {
      std::snprintf(message, room, "%s", error.what());
      return begun;
    }
    at += 3 + at[2];
  }
  return 0;
}
