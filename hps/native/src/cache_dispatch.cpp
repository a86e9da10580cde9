#include "hps/cache_read.hpp"

namespace hps {

namespace baseline {
extern const ReadKernels kKernels;
}
#ifdef HPS_HAVE_X86_LEVELS
namespace avx2 {
extern const ReadKernels kKernels;
}
namespace avx512 {
extern const ReadKernels kKernels;
}
#endif

std::vector<const ReadKernels*> runnable_kernels() {
  std::vector<const ReadKernels*> found;
#ifdef HPS_HAVE_X86_LEVELS
  // The features of x86-64-v4 and -v3 that compilers use.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd"))
    found.push_back(&avx512::kKernels);
  if (v3) found.push_back(&avx2::kKernels);
#endif
  found.push_back(&baseline::kKernels);
  return found;
}

}  // namespace hps
