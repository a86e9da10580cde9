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

const ReadKernels& read_kernels() {
#ifdef HPS_HAVE_X86_LEVELS
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd"))
    return avx512::kKernels;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma"))
    return avx2::kKernels;
#endif
  return baseline::kKernels;
}

}  // namespace hps
