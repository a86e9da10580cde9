// Operators of the domain "hps" for ONNX Runtime: this module is also a library of custom
// operators. A kernel copies its inputs to NumPy arrays, calls Python's function and copies the
// result.
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "hps/onnxruntime_abi.hpp"

namespace {

namespace ort = hps::ort;

// hps.onnx's function, see _core.pyi. Not freed: sessions may outlive the interpreter.
nb::object* make_kernel = nullptr;

struct Kernel {
  const ort::Api* api;
  nb::object compute;
};

struct Operator : ort::CustomOp {
  const char* name;
  std::vector<std::pair<ort::ElementType, ort::Presence>> inputs;
};

struct StatusError {
  ort::Status* status;
};

void check(ort::Status* status) {
  if (status) throw StatusError{status};
}

// Runs `work` and returns its failure as a status; the text of a Python error is "Type: message".
// What else unwinds the stack is the end of a thread while the interpreter shuts down, see
// WithoutGil.
template <typename Work>
ort::Status* reported(const ort::Api* api, Work work) noexcept {
  std::string text = "unknown error";
  try {
    work();
    return nullptr;
  } catch (const StatusError& error) {
    return error.status;
  } catch (const nb::python_error& error) {
    try {
      text = nb::cast<std::string>(error.type().attr("__name__")) + ": " +
             nb::cast<std::string>(nb::str(error.value()));
    } catch (...) {
    }
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {
    for (;;) pause();
  }
  return ort::create_status(api, ort::kFail, text.c_str());
}

std::optional<std::string> string_attribute(const ort::Api* api, const ort::KernelInfo* info,
                                            const char* name) {
  std::size_t size = 0;  // with the null at the end; stays 0 if there is no such attribute
  if (ort::Status* status = ort::get_string_attribute(api, info, name, nullptr, &size))
    ort::release_status(api, status);
  if (!size) return std::nullopt;
  std::string text(size, '\0');
  check(ort::get_string_attribute(api, info, name, text.data(), &size));
  text.resize(size - 1);
  return text;
}

ort::Status* create(const ort::CustomOp* op, const ort::Api* api, const ort::KernelInfo* info,
                    void** kernel) {
  const nb::gil_scoped_acquire gil;
  return reported(api, [&] {
    nb::dict attributes;
    for (const char* name : {"node", "model", "table", "version", "mode"})
      if (const auto text = string_attribute(api, info, name)) attributes[name] = nb::cast(*text);
    float max_norm = 0;
    if (ort::Status* missing = ort::get_float_attribute(api, info, "max_norm", &max_norm))
      ort::release_status(api, missing);
    else
      attributes["max_norm"] = nb::cast(max_norm);
    *kernel = new Kernel{api, (*make_kernel)(op->get_name(op), attributes)};
  });
}

void destroy(void* kernel) {
  if (!Py_IsInitialized()) return;
  const nb::gil_scoped_acquire gil;
  delete static_cast<Kernel*>(kernel);
}

template <typename T>
nb::object copied(const void* data, const std::vector<std::size_t>& shape, std::size_t n) {
  std::unique_ptr<T[]> copy(new T[n]);
  if (n) std::memcpy(copy.get(), data, n * sizeof(T));
  T* raw = copy.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(raw, shape.size(), shape.data(), owner));
}

// The input as an array; None if the node leaves it out.
nb::object input_array(const ort::Api* api, const ort::KernelContext* context, std::size_t number) {
  const ort::Value* value = nullptr;
  check(ort::get_input(api, context, number, &value));
  if (!value) return nb::none();
  ort::TensorInfo* info = nullptr;
  check(ort::get_tensor_info(api, value, &info));
  const auto release = [api](ort::TensorInfo* p) { ort::release_tensor_info(api, p); };
  const std::unique_ptr<ort::TensorInfo, decltype(release)> owner(info, release);
  ort::ElementType type{};
  check(ort::get_element_type(api, info, &type));
  std::size_t dimensions = 0;
  check(ort::count_dimensions(api, info, &dimensions));
  std::vector<std::int64_t> sizes(dimensions);
  check(ort::get_dimensions(api, info, sizes.data(), dimensions));
  std::size_t n = 1;
  for (const std::int64_t size : sizes) n *= static_cast<std::size_t>(size);
  void* data = nullptr;
  check(ort::get_data(api, const_cast<ort::Value*>(value), &data));
  const std::vector<std::size_t> shape(sizes.begin(), sizes.end());
  if (type == ort::kInt64) return copied<std::int64_t>(data, shape, n);
  return copied<float>(data, shape, n);
}

ort::Status* compute(void* opaque, ort::KernelContext* context) {
  const nb::gil_scoped_acquire gil;
  const auto& [api, function] = *static_cast<Kernel*>(opaque);
  return reported(api, [&, api = api, &function = function] {
    std::size_t count = 0;
    check(ort::count_inputs(api, context, &count));
    nb::list inputs;
    for (std::size_t i = 0; i < count; ++i) inputs.append(input_array(api, context, i));
    using Output = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
    const Output result = nb::cast<Output>(function(*inputs));
    std::vector<std::int64_t> shape(result.ndim());
    for (std::size_t i = 0; i < shape.size(); ++i)
      shape[i] = static_cast<std::int64_t>(result.shape(i));
    ort::Value* output = nullptr;
    check(ort::get_output(api, context, 0, shape.data(), shape.size(), &output));
    void* data = nullptr;
    check(ort::get_data(api, output, &data));
    if (result.nbytes())
      without_gil_for_bytes(result.nbytes(),
                            [&] { std::memcpy(data, result.data(), result.nbytes()); });
  });
}

const Operator& operator_of(const ort::CustomOp* op) { return *static_cast<const Operator*>(op); }
int one(const ort::CustomOp*) { return 1; }

Operator make_operator(const char* name,
                       std::vector<std::pair<ort::ElementType, ort::Presence>> inputs) {
  Operator made{};
  made.version = ort::kApiVersion;
  made.get_name = [](const ort::CustomOp* op) { return operator_of(op).name; };
  made.get_provider = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  made.get_input_type = [](const ort::CustomOp* op, std::size_t i) {
    return operator_of(op).inputs[i].first;
  };
  made.count_inputs = [](const ort::CustomOp* op) { return operator_of(op).inputs.size(); };
  made.get_output_type = [](const ort::CustomOp*, std::size_t) { return ort::kFloat; };
  made.count_outputs = [](const ort::CustomOp*) -> std::size_t { return 1; };
  made.destroy = destroy;
  made.get_input_presence = [](const ort::CustomOp* op, std::size_t i) {
    return operator_of(op).inputs[i].second;
  };
  made.get_output_presence = [](const ort::CustomOp*, std::size_t) { return ort::kRequired; };
  made.get_input_memory = [](const ort::CustomOp*, std::size_t) { return ort::kDefaultMemory; };
  made.get_least_variadic_inputs = made.are_variadic_inputs_alike = one;
  made.get_least_variadic_outputs = made.are_variadic_outputs_alike = one;
  made.create_v2 = create;
  made.compute_v2 = compute;
  made.name = name;
  made.inputs = std::move(inputs);
  return made;
}

// The domain with its operators: one for all sessions, never freed.
ort::Domain* make_domain(const ort::Api* api) {
  static const Operator embedding = make_operator("Embedding", {{ort::kInt64, ort::kRequired}});
  static const Operator embedding_bag =
      make_operator("EmbeddingBag", {{ort::kInt64, ort::kRequired},
                                     {ort::kInt64, ort::kOptional},
                                     {ort::kFloat, ort::kOptional}});
  ort::Domain* domain = nullptr;
  check(ort::create_domain(api, "hps", &domain));
  check(ort::add_operator(api, domain, &embedding));
  check(ort::add_operator(api, domain, &embedding_bag));
  return domain;
}

}  // namespace

// Called by ONNX Runtime's SessionOptions.register_custom_ops_library.
extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
  const ort::Api* api = base->get_api(ort::kApiVersion);
  if (!api)
    return ort::create_status(base->get_api(1), ort::kFail, "hps needs ONNX Runtime 1.16 or newer");
  if (!make_kernel)
    return ort::create_status(api, ort::kFail, "call hps.onnx.register_operators instead");
  return reported(api, [&] {
    static ort::Domain* const domain = make_domain(api);
    check(ort::add_domain(api, options, domain));
  });
}

void bind_onnx(nb::module_& m) {
  m.def("set_onnx_kernels", [](nb::object function) {
    delete std::exchange(make_kernel, new nb::object(std::move(function)));
  });
}
