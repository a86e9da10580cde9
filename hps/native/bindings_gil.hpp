// Release of Python's global interpreter lock.
#pragma once

#include <Python.h>
#include <unistd.h>

// Releases the GIL for its lifetime. A thread that reacquires it while the interpreter shuts down
// waits for the end of the process, as in Python 3.14 and later. Earlier versions unwind the
// thread's stack, which calls std::terminate in a destructor: a program that ended during a lookup
// aborted.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // pthread_exit's unwinding must not leave the destructor
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};
