// Release of Python's global interpreter lock.
#pragma once

#include <Python.h>
#include <unistd.h>

// Gives the GIL up for its lifetime. A thread that wants it back while the interpreter ends waits
// for the end of the process, as from Python 3.14 on. Before, Python unwinds the thread's stack,
// which a destructor answers with std::terminate: a program that ended during a lookup was aborted.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // pthread_exit's unwinding, which must not end here
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};
