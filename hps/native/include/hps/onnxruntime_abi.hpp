// The part of ONNX Runtime's binary interface that custom operators use. Its Python packages come
// without its header, onnxruntime_c_api.h, so structures and positions are stated here. ONNX
// Runtime only appends to them: what is stated holds for every later version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hps::ort {

// Opaque types of ONNX Runtime.
struct Api;
struct Domain;
struct KernelContext;
struct KernelInfo;
struct SessionOptions;
struct Status;
struct TensorInfo;
struct Value;

// The interface of ONNX Runtime 1.16, the first whose operators report errors by a status.
constexpr std::uint32_t kApiVersion = 16;

// What a library of operators gets: the table of functions of a version, null if it has no such
// one.
struct ApiBase {
  const Api* (*get_api)(std::uint32_t version);
  const char* (*get_version)();
};

enum ErrorCode : int { kFail = 1 };
enum ElementType : int { kFloat = 1, kInt64 = 7 };
enum Presence : int { kRequired = 0, kOptional = 1 };
enum MemoryType : int { kDefaultMemory = 0 };

// A description of an operator, as far as version 16 reads it.
struct CustomOp {
  std::uint32_t version;
  void* (*create)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_provider)(const CustomOp*);
  ElementType (*get_input_type)(const CustomOp*, std::size_t);
  std::size_t (*count_inputs)(const CustomOp*);
  ElementType (*get_output_type)(const CustomOp*, std::size_t);
  std::size_t (*count_outputs)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  Presence (*get_input_presence)(const CustomOp*, std::size_t);
  Presence (*get_output_presence)(const CustomOp*, std::size_t);
  MemoryType (*get_input_memory)(const CustomOp*, std::size_t);
  int (*get_least_variadic_inputs)(const CustomOp*);
  int (*are_variadic_inputs_alike)(const CustomOp*);
  int (*get_least_variadic_outputs)(const CustomOp*);
  int (*are_variadic_outputs_alike)(const CustomOp*);
  Status* (*create_v2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*compute_v2)(void* kernel, KernelContext*);
};

// The function at a position of the table. Those that return a Status* return null for success.
template <std::size_t Position, typename Result, typename... Arguments>
struct Function {
  Result operator()(const Api* api, Arguments... arguments) const {
    using Pointer = Result (*)(Arguments...);
    void* const found = reinterpret_cast<void* const*>(api)[Position];
    return reinterpret_cast<Pointer>(found)(arguments...);
  }
};

constexpr Function<0, Status*, int, const char*> create_status{};
constexpr Function<26, Status*, const char*, Domain**> create_domain{};
constexpr Function<27, Status*, Domain*, const CustomOp*> add_operator{};
constexpr Function<28, Status*, SessionOptions*, Domain*> add_domain{};
constexpr Function<51, Status*, Value*, void**> get_data{};
constexpr Function<60, Status*, const TensorInfo*, ElementType*> get_element_type{};
constexpr Function<61, Status*, const TensorInfo*, std::size_t*> count_dimensions{};
constexpr Function<62, Status*, const TensorInfo*, std::int64_t*, std::size_t> get_dimensions{};
constexpr Function<65, Status*, const Value*, TensorInfo**> get_tensor_info{};
constexpr Function<85, Status*, const KernelInfo*, const char*, float*> get_float_attribute{};
constexpr Function<87, Status*, const KernelInfo*, const char*, char*, std::size_t*>
    get_string_attribute{};
constexpr Function<88, Status*, const KernelContext*, std::size_t*> count_inputs{};
constexpr Function<90, Status*, const KernelContext*, std::size_t, const Value**> get_input{};
constexpr Function<91, Status*, KernelContext*, std::size_t, const std::int64_t*, std::size_t,
                   Value**>
    get_output{};
constexpr Function<93, void, Status*> release_status{};
constexpr Function<99, void, TensorInfo*> release_tensor_info{};

}  // namespace hps::ort
