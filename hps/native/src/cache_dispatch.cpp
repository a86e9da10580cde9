#include "hps/cache_read.hpp"
#include "hps/mapped_read.hpp"

namespace hps {

namespace baseline {
extern const ReadKernels kKernels;
extern const MappedKernels kMappedKernels;
}  // namespace baseline
#ifdef HPS_HAVE_X86_LEVELS
namespace avx2 {
extern const ReadKernels kKernels;
extern const MappedKernels kMappedKernels;
}  // namespace avx2
namespace avx512 {
extern const ReadKernels kKernels;
extern const MappedKernels kMappedKernels;
}  // namespace avx512

namespace {

// The features of x86-64-v3 and -v4 that compilers use.
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
}

bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512cd");
}

}  // namespace
#endif

std::vector<const ReadKernels*> runnable_kernels() {
  std::vector<const ReadKernels*> found;
#ifdef HPS_HAVE_X86_LEVELS
  if (has_v4()) found.push_back(&avx512::kKernels);
  if (has_v3()) found.push_back(&avx2::kKernels);
#endif
  found.push_back(&baseline::kKernels);
  return found;
}

std::vector<const MappedKernels*> runnable_mapped_kernels() {
  std::vector<const MappedKernels*> found;
#ifdef HPS_HAVE_X86_LEVELS
  if (has_v4()) found.push_back(&avx512::kMappedKernels);
  if (has_v3()) found.push_back(&avx2::kMappedKernels);
#endif
  found.push_back(&baseline::kMappedKernels);
  return found;
}

}  // namespace hps
