// Threads of the OpenMP runtime that torch has loaded: found when the library is loaded, never linked, so a
// process never has two of them. Where there is none, or one thread is asked for, the caller does it all.
#pragma once
#include <atomic>
#include <cstdint>

extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
void GOMP_barrier() __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

namespace k3 {

struct Team {
  int rank, size;
  void barrier() const {
    if (size > 1) GOMP_barrier();
  }
};

// body(Team) once in each thread.
template <class Body>
void parallel(int64_t threads, Body& body) {
  if (threads < 2 || !GOMP_parallel || !GOMP_barrier || !omp_get_thread_num || !omp_get_num_threads) {
    body(Team{0, 1});
    return;
  }
  GOMP_parallel(
      [](void* data) { (*static_cast<Body*>(data))(Team{omp_get_thread_num(), omp_get_num_threads()}); },
      &body, static_cast<unsigned>(threads), 0);
}

// Numbers 0 .. count - 1, each handed out once.
struct Tasks {
  std::atomic<int64_t> next{0};
  bool take(int64_t count, int64_t& task) {
    task = next.fetch_add(1, std::memory_order_relaxed);
    return task < count;
  }
};

}  // namespace k3
