// Python bindings of the batch scheduler and of its clients' channels.
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings_table.hpp"
#include "hps/batch_scheduler.hpp"

namespace {

using Address = std::uint64_t;
using Column = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Writable = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// A Python function that the scheduler's thread calls, and drops, with the GIL.
class HeldFunction {
 public:
  explicit HeldFunction(nb::object function) : function_(std::move(function)) {}
  ~HeldFunction() {
    const nb::gil_scoped_acquire acquired;
    function_.reset();
  }
  bool call() const {
    const nb::gil_scoped_acquire acquired;
    try {
      return nb::cast<bool>(function_());
    } catch (...) {  // the function logs its own errors
      return false;
    }
  }

 private:
  nb::object function_;
};

hps::Step copy_step(hps::Step::Kind kind, Address device, Address host, std::size_t bytes) {
  hps::Step step;
  step.kind = kind;
  step.device = device;
  step.host = pointer<void>(host);
  step.bytes = bytes;
  return step;
}

hps::Step kernel_step(Address function, std::uint32_t blocks, std::uint32_t threads,
                      Address arguments, bool reads_tables,
                      const std::vector<std::pair<Address, Address>>& fresh) {
  hps::Step step;
  step.kind = hps::Step::Kind::kKernel;
  step.function = pointer<void>(function);
  step.blocks = blocks;
  step.threads = threads;
  step.host = pointer<void>(arguments);
  step.reads_tables = reads_tables;
  for (const auto& [field, value] : fresh)
    step.fresh.emplace_back(pointer<std::uint32_t>(field), pointer<const std::uint32_t>(value));
  return step;
}

hps::Step graph_step(Address graph) {
  hps::Step step;
  step.kind = hps::Step::Kind::kGraph;
  step.function = pointer<void>(graph);
  return step;
}

hps::Step call_step(nb::object function) {
  hps::Step step;
  auto held = std::make_shared<HeldFunction>(std::move(function));
  step.call = [held] { return held->call(); };
  return step;
}

hps::Step clear_step(Address device, std::size_t bytes) {
  return copy_step(hps::Step::Kind::kClear, device, 0, bytes);
}

// Table or None, base, first, count, hotness, feature, address of `used`.
using PartFields = std::tuple<nb::object, std::uint32_t, std::uint32_t, std::uint32_t,
                              std::uint32_t, std::uint32_t, Address>;

hps::FillChunk make_chunk(const std::vector<PartFields>& parts, Address missing, Address positions,
                          Address keys, const hps::Step& place, std::uint32_t rows_per_block,
                          const std::tuple<Address, Address, Address, Address>& arguments) {
  hps::FillChunk made{};
  for (const auto& [table, base, first, count, hotness, feature, used] : parts) {
    const RowTable* held = nullptr;
    if (!table.is_none()) held = nb::cast<const RowTable*>(table);
    made.parts.push_back({held == nullptr ? nullptr : &held->reader(), base, first, count, hotness,
                          feature, pointer<std::uint32_t>(used)});
  }
  made.missing = pointer<const std::uint32_t>(missing);
  made.positions = pointer<const std::uint32_t>(positions);
  made.keys = pointer<const std::int64_t>(keys);
  made.place = place;
  made.rows_per_block = rows_per_block;
  made.at_positions = pointer<std::uint64_t>(std::get<0>(arguments));
  made.at_rows = pointer<std::uint64_t>(std::get<1>(arguments));
  made.at_sources = pointer<std::uint64_t>(std::get<2>(arguments));
  made.at_n = pointer<std::uint32_t>(std::get<3>(arguments));
  return made;
}

std::shared_ptr<hps::MissFill> make_fill(std::vector<hps::Step> fetch,
                                         std::vector<hps::FillChunk> chunks,
                                         std::vector<hps::Step> rest, Address memory,
                                         std::size_t bytes, std::size_t stride, std::uint8_t code) {
  auto made = std::make_shared<hps::MissFill>();
  if (stride == 0 || stride % 16 != 0 || bytes < 2 * (16 + stride + 1))
    throw std::invalid_argument("the memory must hold two rows, whose stride is a multiple of 16");
  made->fetch = std::move(fetch);
  made->chunks = std::move(chunks);
  made->rest = std::move(rest);
  made->memory = pointer<std::uint8_t>(memory);
  made->bytes = bytes;
  made->stride = stride;
  made->code = code;
  for (const hps::FillChunk& chunk : made->chunks)
    for (const hps::FillPart& part : chunk.parts) {
      made->features = std::max(made->features, part.feature + 1);
      if (part.table != nullptr && part.table->row_bytes() > stride)
        throw std::invalid_argument("the stride must be at least as long as the tables' rows");
      if (part.hotness == 0) throw std::invalid_argument("hotness must be at least 1");
    }
  return made;
}

hps::SizeClass make_size_class(std::uint32_t batch, const std::vector<Address>& inputs,
                               const std::vector<Address>& outputs,
                               const std::vector<Address>& missing_keys,
                               std::vector<hps::Step> steps, std::shared_ptr<hps::MissFill> fill) {
  hps::SizeClass made;
  made.batch = batch;
  for (const Address each : inputs) made.inputs.push_back(pointer<std::uint8_t>(each));
  for (const Address each : outputs) made.outputs.push_back(pointer<std::uint8_t>(each));
  for (const Address each : missing_keys)
    made.missing_keys.push_back(pointer<const std::uint32_t>(each));
  made.steps = std::move(steps);
  made.fill = std::move(fill);
  return made;
}

std::uint32_t py_add_lane(hps::BatchScheduler& scheduler, std::uint32_t model,
                          const std::vector<const hps::SizeClass*>& classes, Address context,
                          Address stream) {
  std::vector<hps::SizeClass> copies;
  for (const hps::SizeClass* each : classes) copies.push_back(*each);
  return scheduler.add_lane(model, std::move(copies), pointer<void>(context),
                            pointer<void>(stream));
}

template <typename T>
nb::object as_array(const std::vector<T>& values) {
  std::unique_ptr<T[]> copy(new T[values.size()]);
  std::copy(values.begin(), values.end(), copy.get());
  return nb::cast(as_numpy(std::move(copy), values.size()));
}

nb::object py_take_report(hps::BatchScheduler& scheduler, int timeout_ms) {
  hps::FillReport report;
  bool found = false;
  {
    const WithoutGil released;
    found = scheduler.take_report(report, timeout_ms);
  }
  if (!found) return nb::none();
  nb::dict made;
  made["model"] = report.model;
  made["samples"] = report.samples;
  made["missed"] = as_array(report.missed);
  made["found"] = as_array(report.found);
  made["answered"] = report.answered;
  made["filled"] = as_array(report.filled);
  made["fetch_s"] = as_array(report.fetch_s);
  made["gather_s"] = as_array(report.gather_s);
  made["request_s"] = as_array(report.request_s);
  made["features"] = as_array(report.features);
  made["keys"] = as_array(report.keys);
  return made;
}

// A view that does not keep the memory.
Writable view(std::uint8_t* data, std::size_t size) {
  // Without an owner, the array would be a copy.
  return Writable(data, {size}, nb::capsule(data, [](void*) noexcept {}));
}

nb::object py_take_slow(hps::BatchScheduler& scheduler, int timeout_ms) {
  hps::BatchScheduler::SlowRequest request{};
  bool found = false;
  {
    const WithoutGil released;
    found = scheduler.take_slow(request, timeout_ms);
  }
  if (!found) return nb::none();
  return nb::make_tuple(request.number, request.model, request.batch, request.deadline_ns,
                        view(request.inputs, request.in_bytes),
                        view(request.outputs, request.out_bytes));
}

nb::dict py_counts(hps::BatchScheduler& scheduler, std::uint32_t model) {
  hps::ModelCounts counts;
  {
    const WithoutGil released;
    counts = scheduler.counts(model);
  }
  nb::dict found;
  found["requests"] = counts.requests;
  found["samples"] = counts.samples;
  found["batches"] = counts.batches;
  found["expired"] = counts.expired;
  found["failed"] = counts.failed;
  found["incomplete"] = counts.incomplete;
  found["slow"] = counts.slow;
  found["device_ns"] = counts.device_ns;
  return found;
}

// Where a message has the columns of a request: bytes from `offset` on, to which `add` is added as
// 64-bit integers unless it is 0.
struct MessageColumn {
  std::uint64_t offset, bytes;
  std::int64_t add;
};

class MessageLayout {
 public:
  explicit MessageLayout(
      const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::int64_t>>& columns) {
    for (const auto& [offset, bytes, add] : columns) {
      columns_.push_back({offset, bytes, add});
      bytes_ += bytes;
      end_ = std::max(end_, offset + bytes);
    }
  }

  void copy(const char* message, std::uint8_t* to) const {
    for (const MessageColumn& column : columns_) {
      std::memcpy(to, message + column.offset, column.bytes);
      if (column.add != 0) {
        for (std::uint64_t at = 0; at + 8 <= column.bytes; at += 8) {
          std::uint64_t key;
          std::memcpy(&key, to + at, 8);
          key += static_cast<std::uint64_t>(column.add);
          std::memcpy(to + at, &key, 8);
        }
      }
      to += column.bytes;
    }
  }

  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t end() const { return end_; }

 private:
  std::vector<MessageColumn> columns_;
  std::uint64_t bytes_ = 0, end_ = 0;
};

// A ChannelClient that copies arrays in and out.
class Client {
 public:
  Client(int file, int wake, int woken) : client_(file, wake, woken) {}

  bool submit(std::uint64_t ticket, std::uint32_t model, std::uint32_t batch,
              std::int64_t deadline_ns, const std::vector<Column>& columns, std::uint64_t out_bytes,
              std::uint64_t reply_bytes) {
    std::uint64_t in_bytes = 0;
    for (const Column& column : columns) in_bytes += column.nbytes();
    return send({ticket, model, batch, deadline_ns, in_bytes, out_bytes, reply_bytes},
                [&](std::uint8_t* to) {
                  for (const Column& column : columns) {
                    std::memcpy(to, column.data(), column.nbytes());
                    to += column.nbytes();
                  }
                });
  }

  bool submit_message(std::uint64_t ticket, std::uint32_t model, std::uint32_t batch,
                      std::int64_t deadline_ns, const nb::bytes& message, std::uint64_t start,
                      const MessageLayout& layout, std::uint64_t out_bytes,
                      std::uint64_t reply_bytes) {
    if (start > message.size() || layout.end() > message.size() - start)
      throw std::invalid_argument("the message is shorter than its layout");
    const char* data = message.c_str() + start;
    return send({ticket, model, batch, deadline_ns, layout.bytes(), out_bytes, reply_bytes},
                [&](std::uint8_t* to) { layout.copy(data, to); });
  }

  nb::list receive(int timeout_ms) {
    std::vector<hps::RequestSlot*> answered;
    if (timeout_ms == 0) {
      client_.receive(answered, 0);
    } else {
      const WithoutGil released;
      client_.receive(answered, timeout_ms);
    }
    nb::list found;
    for (hps::RequestSlot* slot : answered) {
      const bool reply = slot->status == hps::RequestStatus::kReplied ||
                         slot->status == hps::RequestStatus::kFailed;
      const bool done = slot->status == hps::RequestStatus::kDone;
      const std::size_t size = done ? slot->column_bytes : reply ? slot->reply_bytes : 0;
      std::unique_ptr<std::uint8_t[]> copy(new std::uint8_t[size]);
      std::memcpy(copy.get(), hps::ChannelClient::outputs(slot), size);
      found.append(nb::make_tuple(slot->ticket, static_cast<std::uint32_t>(slot->status),
                                  as_numpy(std::move(copy), size), done ? slot->reply_bytes : 0,
                                  slot->launched_ns, slot->ended_ns));
      client_.free(slot);
    }
    return found;
  }

  bool sleep() { return client_.sleep(); }
  void interrupt() { client_.interrupt(); }
  std::size_t capacity() const { return client_.capacity(); }

 private:
  struct Head {
    std::uint64_t ticket;
    std::uint32_t model, batch;
    std::int64_t deadline_ns;
    std::uint64_t in_bytes, out_bytes, reply_bytes;
  };

  // Sends a request whose inputs `copy` writes; false if the channel is full.
  template <typename Copy>
  bool send(const Head& head, Copy copy) {
    hps::RequestSlot* slot =
        client_.allocate(head.in_bytes, std::max(head.out_bytes, head.reply_bytes));
    if (slot == nullptr) return false;
    slot->ticket = head.ticket;
    slot->column_bytes = head.out_bytes;
    slot->model = head.model;
    slot->batch = head.batch;
    slot->deadline_ns = head.deadline_ns;
    without_gil_for_bytes(head.in_bytes, [&] { copy(hps::ChannelClient::inputs(slot)); });
    client_.submit(slot);
    return true;
  }

  hps::ChannelClient client_;
};

}  // namespace

void bind_scheduler(nb::module_& m) {
  nb::class_<hps::Step>(m, "Step")
      .def_static("copy_in",
                  [](Address device, Address host, std::size_t bytes) {
                    return copy_step(hps::Step::Kind::kCopyIn, device, host, bytes);
                  })
      .def_static("copy_out",
                  [](Address host, Address device, std::size_t bytes) {
                    return copy_step(hps::Step::Kind::kCopyOut, device, host, bytes);
                  })
      .def_static("kernel", &kernel_step, nb::arg("function"), nb::arg("blocks"),
                  nb::arg("threads"), nb::arg("arguments"), nb::arg("reads_tables"),
                  nb::arg("fresh"))
      .def_static("clear", &clear_step)
      .def_static("graph", &graph_step)
      .def_static("call", &call_step);
  nb::class_<hps::FillChunk>(m, "FillChunk")
      .def_static("make", &make_chunk, nb::arg("parts"), nb::arg("missing"), nb::arg("positions"),
                  nb::arg("keys"), nb::arg("place"), nb::arg("rows_per_block"),
                  nb::arg("arguments"));
  nb::class_<hps::MissFill>(m, "MissFill")
      .def_static("make", &make_fill, nb::arg("fetch"), nb::arg("chunks"), nb::arg("rest"),
                  nb::arg("memory"), nb::arg("bytes"), nb::arg("stride"), nb::arg("code"));
  nb::class_<hps::SizeClass>(m, "SizeClass")
      .def_static("make", &make_size_class, nb::arg("batch"), nb::arg("inputs"), nb::arg("outputs"),
                  nb::arg("missing_keys"), nb::arg("steps"), nb::arg("fill").none() = nb::none());
  nb::class_<hps::BatchScheduler>(m, "BatchScheduler")
      .def(nb::init<int, std::uint32_t, std::size_t>(), nb::arg("wake"), nb::arg("spin_us"),
           nb::arg("gathered_here") = 256)
      .def("run",
           [](hps::BatchScheduler& scheduler) {
             const WithoutGil released;
             scheduler.run();
           })
      .def("stop", &hps::BatchScheduler::stop)
      .def("add_model",
           [](hps::BatchScheduler& scheduler, std::vector<std::uint32_t> inputs,
              std::vector<std::uint32_t> outputs) {
             return scheduler.add_model({std::move(inputs), std::move(outputs)});
           })
      .def("add_lane", &py_add_lane, nb::arg("model"), nb::arg("classes"), nb::arg("context"),
           nb::arg("stream"))
      .def("remove_model",
           [](hps::BatchScheduler& scheduler, std::uint32_t model) {
             const WithoutGil released;
             scheduler.remove_model(model);
           })
      .def("add_channel", &hps::BatchScheduler::add_channel)
      .def("remove_channel", &hps::BatchScheduler::remove_channel)
      .def("counts", &py_counts)
      .def("fill_batches",
           [](hps::BatchScheduler& scheduler) {
             const WithoutGil released;
             scheduler.fill_batches();
           })
      .def_prop_ro("filling_threads", &hps::BatchScheduler::filling_threads)
      .def("take_report", &py_take_report, nb::arg("timeout_ms"))
      .def("take_slow", &py_take_slow, nb::arg("timeout_ms"))
      .def("answer_slow",
           [](hps::BatchScheduler& scheduler, std::uint64_t number, std::uint32_t status,
              std::uint64_t reply_bytes) {
             scheduler.answer_slow(number, static_cast<hps::RequestStatus>(status), reply_bytes);
           })
      .def("hold_back", [](hps::BatchScheduler& scheduler, Address stream) {
        const WithoutGil released;
        return scheduler.hold_back(pointer<void>(stream));
      });
  nb::class_<MessageLayout>(m, "MessageLayout")
      .def(nb::init<const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::int64_t>>&>(),
           nb::arg("columns"));
  nb::class_<Client>(m, "ChannelClient")
      .def(nb::init<int, int, int>(), nb::arg("file"), nb::arg("wake"), nb::arg("woken"))
      .def("submit", &Client::submit, nb::arg("ticket"), nb::arg("model"), nb::arg("batch"),
           nb::arg("deadline_ns"), nb::arg("columns"), nb::arg("out_bytes"), nb::arg("reply_bytes"))
      .def("submit_message", &Client::submit_message, nb::arg("ticket"), nb::arg("model"),
           nb::arg("batch"), nb::arg("deadline_ns"), nb::arg("message"), nb::arg("start"),
           nb::arg("layout"), nb::arg("out_bytes"), nb::arg("reply_bytes"))
      .def("receive", &Client::receive, nb::arg("timeout_ms"))
      .def("sleep", &Client::sleep)
      .def("interrupt", &Client::interrupt)
      .def_prop_ro("capacity", &Client::capacity);
}
