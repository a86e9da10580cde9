// Open-loop load generator for REST and gRPC: requests of several kinds are sent when they are due,
// whether earlier ones are answered or not.
//   load KEY=VALUE…   keys as in `benchmarks/open_load/__init__.py`
// Writes a record of each answer to `records`; runs until its time is over or standard input ends.
// One thread; a connection has one request at a time.
#include <poll.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <deque>
#include <fstream>
#include <map>
#include <sstream>

#include "../native_load/connection.hpp"

namespace {

using Options = std::map<std::string, std::string>;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
  return parts;
}

// As `RECORD` in `__init__.py`. Times are of the monotonic clock, in ns; `status` 200 is OK.
struct Record {
  int64_t due, sent, end;
  float value;  // the number that all of the answer's checked numbers must equal
  int16_t status;
  uint8_t kind, wrong;  // wrong: 1 if the numbers differ; 2 if the others are 0, a default
};

struct Kind {
  Request request;
  std::string protocol;
  double share = 1;
  size_t count = 0, stride = 1;  // the last `count` FP32, of which every `stride`th must be equal
};

struct Plan {
  std::vector<Kind> kinds;
  sockaddr_in address{};
  double rate = 0;  // per second; 0: closed loop
  size_t connections = 1;
  uint64_t seed = 1;
  int64_t begin = 0, end = 0;
  // A connection that was idle for so long is opened again: the server may be closing it.
  int64_t idle = 0;
};

Kind make_kind(Options& options, const std::string& prefix) {
  Kind kind;
  kind.protocol = options.at(prefix + "protocol");
  kind.request.message = read_file(options.at(prefix + "message"));
  if (kind.protocol == "grpc") kind.request.head = read_file(options.at(prefix + "head"));
  for (const std::string& each : split(options[prefix + "patches"], ',')) {
    auto parts = split(each, ':');
    kind.request.patches.push_back({std::stoull(parts.at(0)), std::stoull(parts.at(1)),
                                    std::stoull(parts.at(2)), std::stoi(parts.at(3)),
                                    std::stoi(parts.at(4))});
  }
  kind.share = std::stod(options.at(prefix + "share"));
  kind.count = std::stoull(options.at(prefix + "count"));
  kind.stride = std::stoull(options.at(prefix + "stride"));
  kind.request.zeros = 1;  // so that connections keep the answers
  return kind;
}

// The checked number of an answer, the first that is not 0; an answer that is too short is wrong.
float checked(const Kind& kind, const std::string& answer, uint8_t& wrong) {
  size_t bytes = kind.count * sizeof(float);
  wrong = answer.size() < bytes;
  float found = 0;
  bool zeros = false;
  const char* at = answer.data() + answer.size() - bytes;
  for (size_t i = 0; !wrong && i < kind.count; i += kind.stride) {
    float each;
    memcpy(&each, at + i * sizeof each, sizeof each);
    zeros |= each == 0;
    found = found == 0 ? each : found;
    wrong = each != 0 && each != found;
  }
  if (!wrong && zeros) wrong = 2;
  return found;
}

class Load {
 public:
  explicit Load(const Plan& plan) : plan_(plan), scratch_(1 << 20), free_(plan.kinds.size()) {
    poll_ = epoll_create1(EPOLL_CLOEXEC);
    for (const Kind& kind : plan.kinds) total_ += kind.share;
  }

  void run() {
    int64_t due = plan_.begin, heard = now_ns();
    if (plan_.rate <= 0)
      for (size_t i = 0; i < plan_.connections; ++i) send(now_ns());
    std::vector<epoll_event> events(256);
    for (bool ended = false; !ended || busy_;) {
      int64_t now = now_ns();
      ended = ended || now >= plan_.end || input_ended(now);
      while (plan_.rate > 0 && !ended && due <= now) {
        send(due);
        due += static_cast<int64_t>(-std::log(1 - random()) / plan_.rate * 1e9);
      }
      int64_t wait = plan_.rate > 0 && !ended ? due - now : 100'000'000;
      timespec time{0, std::clamp<int64_t>(wait, 0, 100'000'000)};
      int n = epoll_pwait2(poll_, events.data(), static_cast<int>(events.size()), &time, nullptr);
      now = now_ns();
      if (n > 0 || !busy_) heard = now;
      if (now - heard > 30'000'000'000) throw std::runtime_error("no answer for 30 s");
      for (int i = 0; i < n; ++i) {
        const epoll_event& event = events[static_cast<size_t>(i)];
        auto found = senders_.find(static_cast<Connection*>(event.data.ptr));
        if (found == senders_.end()) continue;  // replaced meanwhile
        Sender& sender = *found->second;
        try {
          int status = sender.connection->handle(event.events, scratch_);
          if (status) finish(sender, status, ended);
        } catch (const std::runtime_error& error) {
          drop(sender, error.what(), ended);
        }
      }
    }
  }

  std::vector<Record> records;
  std::string first_error;

 private:
  struct Sender {
    std::unique_ptr<Connection> connection;
    size_t kind;
    int64_t due, sent, ended = 0;
    bool busy = false;
  };

  double random() {
    seed_ += 0x9e3779b97f4a7c15ull;
    return static_cast<double>(mix(seed_ + plan_.seed * 1000003) >> 11) * 0x1p-53;
  }

  void send(int64_t due) {
    double at = random() * total_;
    size_t kind = 0;
    while (kind + 1 < plan_.kinds.size() && at >= plan_.kinds[kind].share)
      at -= plan_.kinds[kind++].share;
    Sender* free = free_sender(kind);
    if (!free) {  // counted as failed
      records.push_back({due, 0, now_ns(), 0, 0, static_cast<uint8_t>(kind), 0});
      first_error = first_error.empty() ? "1,000 requests are unanswered" : first_error;
      return;
    }
    Sender& sender = *free;
    sender.due = due;
    sender.busy = true;
    if (!sender.connection || now_ns() - sender.ended > plan_.idle) connect(sender);
    sender.connection->refresh();
    sender.sent = now_ns();
    sender.connection->send_next(false);
    ++busy_;
  }

  Sender* free_sender(size_t kind) {
    auto& free = free_[kind];
    if (!free.empty()) {
      Sender* sender = free.back();
      free.pop_back();
      return sender;
    }
    if (all_.size() >= kMost) return nullptr;
    all_.push_back({});
    all_.back().kind = kind;
    return &all_.back();
  }

  void connect(Sender& sender) {
    if (sender.connection) senders_.erase(sender.connection.get());
    const Kind& of = plan_.kinds[sender.kind];
    uint64_t seed = mix(plan_.seed * 1000003 + ++connected_);
    if (of.protocol == "http")
      sender.connection = std::make_unique<HttpConnection>(of.request, seed);
    else
      sender.connection = std::make_unique<GrpcConnection>(of.request, seed);
    sender.connection->connect(plan_.address, poll_);
    senders_[sender.connection.get()] = &sender;
  }

  // The server closed the connection: an idle one is opened again when it is needed, else the
  // request has failed.
  void drop(Sender& sender, const std::string& error, bool ended) {
    senders_.erase(sender.connection.get());
    sender.connection.reset();
    if (!sender.busy) return;
    if (first_error.empty()) first_error = error;
    finish(sender, 0, ended);
  }

  void finish(Sender& sender, int status, bool ended) {
    uint8_t wrong = 0;
    int64_t now = now_ns();
    float value = 0;
    if (status == 200)
      value = checked(plan_.kinds[sender.kind], sender.connection->answer, wrong);
    else if (first_error.empty() && sender.connection)
      first_error = sender.connection->answer.substr(0, 1000);
    records.push_back({sender.due, sender.sent, now, value, static_cast<int16_t>(status),
                       static_cast<uint8_t>(sender.kind), wrong});
    --busy_;
    sender.busy = false;
    sender.ended = now;
    free_[sender.kind].push_back(&sender);
    if (plan_.rate <= 0 && !ended) send(now);
  }

  bool input_ended(int64_t now) {
    if (now < look_) return false;
    look_ = now + 20'000'000;
    pollfd input{0, POLLIN, 0};
    char c;
    return poll(&input, 1, 0) > 0 && read(0, &c, 1) <= 0;
  }

  static constexpr size_t kMost = 1000;  // connections
  const Plan& plan_;
  std::vector<char> scratch_;
  std::deque<Sender> all_;
  std::vector<std::vector<Sender*>> free_;
  std::map<Connection*, Sender*> senders_;
  int poll_ = -1;
  size_t busy_ = 0, connected_ = 0;
  double total_ = 0;
  uint64_t seed_ = 1;
  int64_t look_ = 0;
};

int run(Options options) {
  Plan plan;
  for (int i = 0; i < std::stoi(options.at("kinds")); ++i)
    plan.kinds.push_back(make_kind(options, std::to_string(i) + "."));
  plan.address.sin_family = AF_INET;
  plan.address.sin_port = htons(static_cast<uint16_t>(std::stoi(options.at("port"))));
  if (inet_pton(AF_INET, options.at("host").c_str(), &plan.address.sin_addr) != 1)
    throw std::runtime_error("host must be an IPv4 address");
  plan.rate = std::stod(options.at("rate"));
  plan.connections = std::stoull(options.at("connections"));
  plan.seed = std::stoull(options.at("seed"));
  plan.idle = static_cast<int64_t>(std::stod(options.at("idle")) * 1e9);
  plan.begin = now_ns();
  plan.end = plan.begin + static_cast<int64_t>(std::stod(options.at("seconds")) * 1e9);
  Load load(plan);
  load.records.reserve(1 << 22);
  std::string failed;
  try {
    load.run();
  } catch (const std::runtime_error& error) {
    failed = error.what();
  }
  std::ofstream file(options.at("records"), std::ios::binary);
  file.write(reinterpret_cast<const char*>(load.records.data()),
             static_cast<std::streamsize>(load.records.size() * sizeof(Record)));
  if (!load.first_error.empty()) fprintf(stderr, "first error: %s\n", load.first_error.c_str());
  if (failed.empty()) return 0;
  fprintf(stderr, "load: %s\n", failed.c_str());
  return 1;
}

}  // namespace

int main(int count, char** words) {
  signal(SIGPIPE, SIG_IGN);
  try {
    Options options;
    for (int i = 1; i < count; ++i) {
      std::string word = words[i];
      size_t at = word.find('=');
      if (at == std::string::npos) throw std::runtime_error("not KEY=VALUE: " + word);
      options[word.substr(0, at)] = word.substr(at + 1);
    }
    return run(options);
  } catch (const std::out_of_range&) {
    fprintf(stderr, "load: a required option is missing; see benchmarks/open_load/__init__.py\n");
  } catch (const std::exception& error) {
    fprintf(stderr, "load: %s\n", error.what());
  }
  return 1;
}
