// Closed-loop load generator for REST and gRPC, and a bare peer that shows what the loopback
// carries.
//   load run KEY=VALUE…    one JSON object on standard output; keys as in
//   `benchmarks/native_load/__init__.py` load sink PORT REQUEST_BYTES ANSWER_BYTES THREADS answers
//   every REQUEST_BYTES with ANSWER_BYTES
// One thread per core of `cores`, or `threads` of them; callers are divided among the threads.
#include <sched.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "connection.hpp"

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

struct Plan {
  Request request;
  std::string protocol, samples_file;
  sockaddr_in address{};
  std::vector<int> cores;
  int callers = 1, threads = 1, samples = 0;
  uint64_t seed = 1;
  bool spin = false, reconnect = false;
  int64_t begin = 0, end = 0;  // ns: answers within are counted
};

Plan make_plan(Options& options) {
  Plan plan;
  plan.protocol = options.at("protocol");
  plan.request.message = read_file(options.at("message"));
  if (plan.protocol == "grpc") plan.request.head = read_file(options.at("head"));
  for (const std::string& each : split(options["patches"], ',')) {
    auto parts = split(each, ':');
    Patch made{std::stoull(parts.at(0)), std::stoull(parts.at(1)), std::stoull(parts.at(2)),
               std::stoi(parts.at(3)), std::stoi(parts.at(4))};
    if (made.limit >> 32 ||
        made.offset + made.count * (made.limit ? 8 : 4) > plan.request.message.size())
      throw std::runtime_error("patch " + each +
                               " is outside of the message, or its limit above 2^32");
    plan.request.patches.push_back(made);
  }
  plan.request.answer_bytes =
      std::stoull(options["answer_bytes"].empty() ? "0" : options["answer_bytes"]);
  plan.request.zeros = std::stoull(options.at("zeros"));
  plan.address.sin_family = AF_INET;
  plan.address.sin_port = htons(static_cast<uint16_t>(std::stoi(options.at("port"))));
  if (inet_pton(AF_INET, options.at("host").c_str(), &plan.address.sin_addr) != 1)
    throw std::runtime_error("host must be an IPv4 address");
  for (const std::string& each : split(options["cores"], ','))
    plan.cores.push_back(std::stoi(each));
  plan.callers = std::stoi(options.at("callers"));
  plan.threads =
      plan.cores.empty() ? std::stoi(options.at("threads")) : static_cast<int>(plan.cores.size());
  plan.threads = std::min(plan.threads, plan.callers);
  plan.seed = std::stoull(options.at("seed"));
  plan.spin = options["spin"] == "1";
  plan.reconnect = options["reconnect"] == "1";
  plan.samples = std::stoi(options["samples"].empty() ? "0" : options["samples"]);
  plan.samples_file = options["samples_file"];
  plan.begin = now_ns() + static_cast<int64_t>(std::stod(options.at("warm_up")) * 1e9);
  plan.end = plan.begin + static_cast<int64_t>(std::stod(options.at("seconds")) * 1e9);
  return plan;
}

// Latencies in ns, statuses other than 200, and broken connections.
struct Result {
  std::vector<int64_t> latencies;
  std::map<int, int64_t> failures;
  int64_t broken = 0, bytes = 0, wrong = 0;
  std::string first_error;
  std::vector<std::pair<std::string, std::string>> samples;
};

std::unique_ptr<Connection> make_connection(const Plan& plan, uint64_t seed) {
  if (plan.protocol == "http") return std::make_unique<HttpConnection>(plan.request, seed);
  if (plan.protocol == "grpc") return std::make_unique<GrpcConnection>(plan.request, seed);
  if (plan.protocol == "raw") return std::make_unique<RawConnection>(plan.request, seed);
  throw std::runtime_error("protocol must be http, grpc or raw");
}

class LoadThread {
 public:
  LoadThread(const Plan& plan, int number, int callers) : plan_(plan), scratch_(1 << 20) {
    poll_ = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < callers; ++i)
      connections_.push_back(make_connection(plan, mix(plan.seed * 1000003 + number * 4096 + i)));
  }
  ~LoadThread() { close(poll_); }

  void run() {
    for (auto& each : connections_) start(*each);
    std::vector<epoll_event> events(256);
    while (busy_ && now_ns() < plan_.end + 10'000'000'000) {
      int n =
          epoll_wait(poll_, events.data(), static_cast<int>(events.size()), plan_.spin ? 0 : 100);
      for (int i = 0; i < n; ++i)
        step(*static_cast<Connection*>(events[i].data.ptr), events[i].events);
    }
    result.broken += busy_;
    if (busy_ && result.first_error.empty()) result.first_error = "no answer for 10 s";
  }

  Result result;

 private:
  void start(Connection& connection) {
    if (!plan_.reconnect || now_ns() < plan_.begin) return open(connection);
    while (now_ns() < plan_.end) {
      try {
        return open(connection);
      } catch (const std::runtime_error&) {  // until another process listens
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
  }

  void open(Connection& connection) {
    connection.connect(plan_.address, poll_);
    ++busy_;
    next(connection);
  }

  void next(Connection& connection) {
    if (!connection.prepared()) connection.refresh();
    // Samples are spread over the run: one in 64 answers.
    bool sample = static_cast<int>(result.samples.size()) < plan_.samples && ++turn_ % 64 == 1;
    connection.started = now_ns();
    connection.send_next(sample);
    if (connection.can_refresh()) connection.refresh();  // while the server works
  }

  void step(Connection& connection, uint32_t events) {
    try {
      int status = connection.handle(events, scratch_);
      if (status)
        finish(connection, status);
      else if (connection.can_refresh())
        connection.refresh();
    } catch (const std::runtime_error& error) {
      ++result.broken;
      --busy_;
      if (result.first_error.empty()) result.first_error = error.what();
      if (plan_.reconnect) start(connection);
    }
  }

  void finish(Connection& connection, int status) {
    int64_t now = now_ns();
    if (status != 200) {
      ++result.failures[status];
      if (result.first_error.empty()) result.first_error = connection.answer.substr(0, 1000);
    } else if (now >= plan_.begin && now <= plan_.end) {
      result.latencies.push_back(now - connection.started);
      result.bytes += static_cast<int64_t>(connection.received);
    }
    result.wrong += status == 200 && !connection.is_right();
    if (status == 200 && connection.is_sample)
      result.samples.emplace_back(connection.message(), connection.answer);
    if (now < plan_.end)
      next(connection);
    else
      --busy_;
  }

  const Plan& plan_;
  std::vector<char> scratch_;
  std::vector<std::unique_ptr<Connection>> connections_;
  int poll_, busy_ = 0, turn_ = 0;
};

std::string escape(const std::string& text) {
  std::string made;
  for (char c : text) {
    bool plain = c >= 32 && c < 127 && c != '"' && c != '\\';
    made += plain ? c : '?';
  }
  return made;
}

void write_samples(const Plan& plan, const std::vector<Result*>& results) {
  if (plan.samples_file.empty()) return;
  std::ofstream file(plan.samples_file, std::ios::binary);
  for (Result* each : results)
    for (auto& [request, answer] : each->samples)
      for (const std::string* part : {&request, &answer}) {
        uint64_t size = part->size();
        file.write(reinterpret_cast<char*>(&size), 8)
            .write(part->data(), static_cast<std::streamsize>(size));
      }
}

void report(const Plan& plan, const std::vector<Result*>& results) {
  std::vector<int64_t> all;
  std::map<int, int64_t> failures;
  int64_t broken = 0, bytes = 0, wrong = 0;
  std::string error;
  for (Result* each : results) {
    all.insert(all.end(), each->latencies.begin(), each->latencies.end());
    for (auto& [status, count] : each->failures) failures[status] += count;
    broken += each->broken;
    bytes += each->bytes;
    wrong += each->wrong;
    if (error.empty()) error = each->first_error;
  }
  std::sort(all.begin(), all.end());
  size_t requests = all.size();
  double count = static_cast<double>(std::max<size_t>(all.size(), 1));
  double seconds = static_cast<double>(plan.end - plan.begin) / 1e9;
  if (all.empty()) all.push_back(0);
  auto ms = [&](double share) {
    return static_cast<double>(all[static_cast<size_t>(share * (count - 1))]) / 1e6;
  };
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  auto cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec +
             static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
  std::cout << std::setprecision(9) << "{\"requests\": " << requests << ", \"seconds\": " << seconds
            << ", \"per_second\": " << static_cast<double>(requests) / seconds
            << ", \"p50_ms\": " << ms(.5) << ", \"p90_ms\": " << ms(.9)
            << ", \"p99_ms\": " << ms(.99) << ", \"p999_ms\": " << ms(.999)
            << ", \"max_ms\": " << ms(1)
            << ", \"answer_bytes\": " << static_cast<double>(bytes) / count
            << ", \"broken\": " << broken << ", \"wrong\": " << wrong
            << ", \"client_cpu_s\": " << cpu << ", \"threads\": " << plan.threads
            << ", \"error\": \"" << escape(error) << "\", \"failures\": {";
  const char* comma = "";
  for (auto& [status, times] : failures) {
    std::cout << comma << '"' << status << "\": " << times;
    comma = ", ";
  }
  std::cout << "}}\n";
}

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}

int run(Options options) {
  Plan plan = make_plan(options);
  std::vector<std::unique_ptr<LoadThread>> threads;
  std::vector<std::thread> running;
  std::mutex lock;
  std::string failed;
  for (int i = 0; i < plan.threads; ++i) {
    int callers = plan.callers / plan.threads + (i < plan.callers % plan.threads);
    threads.push_back(std::make_unique<LoadThread>(plan, i, callers));
    running.emplace_back([&, i] {
      if (!plan.cores.empty()) pin(plan.cores[static_cast<size_t>(i)]);
      try {
        threads[static_cast<size_t>(i)]->run();
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> guard(lock);
        failed = error.what();
      }
    });
  }
  for (auto& each : running) each.join();
  if (!failed.empty()) throw std::runtime_error(failed);
  std::vector<Result*> results;
  for (auto& each : threads) results.push_back(&each->result);
  write_samples(plan, results);
  report(plan, results);
  return 0;
}

// One connection of the sink.
struct SinkPeer {
  int fd;
  size_t got = 0, owed = 0;  // bytes of the present request; bytes of answers not sent yet
};

void serve_sink(int poll, size_t request, size_t answer) {
  std::vector<char> in(1 << 20), out(1 << 20);
  std::vector<epoll_event> events(256);
  for (;;) {
    int n = epoll_wait(poll, events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < n; ++i) {
      auto* peer = static_cast<SinkPeer*>(events[i].data.ptr);
      ssize_t size = recv(peer->fd, in.data(), in.size(), MSG_DONTWAIT);
      if (size == 0 || (size < 0 && errno != EAGAIN)) {
        close(peer->fd);
        delete peer;
        continue;
      }
      for (peer->got += size > 0 ? static_cast<size_t>(size) : 0; peer->got >= request;
           peer->got -= request)
        peer->owed += answer;
      while (peer->owed) {
        size = send(peer->fd, out.data(), std::min(peer->owed, out.size()),
                    MSG_DONTWAIT | MSG_NOSIGNAL);
        if (size < 0) break;
        peer->owed -= static_cast<size_t>(size);
      }
      epoll_event event{EPOLLIN | (peer->owed ? EPOLLOUT : 0u), {.ptr = peer}};
      epoll_ctl(poll, EPOLL_CTL_MOD, peer->fd, &event);
    }
  }
}

int sink(int port, size_t request, size_t answer, int threads) {
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) ||
      listen(listener, 1024))
    throw std::runtime_error(std::string("cannot listen: ") + strerror(errno));
  std::vector<int> polls;
  for (int i = 0; i < threads; ++i) {
    polls.push_back(epoll_create1(EPOLL_CLOEXEC));
    std::thread(serve_sink, polls.back(), request, answer).detach();
  }
  for (size_t turn = 0;; ++turn) {
    int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    epoll_event event{EPOLLIN, {.ptr = new SinkPeer{fd}}};
    epoll_ctl(polls[turn % polls.size()], EPOLL_CTL_ADD, fd, &event);
  }
}

}  // namespace

int main(int count, char** words) {
  signal(SIGPIPE, SIG_IGN);
  try {
    std::string command = count > 1 ? words[1] : "";
    if (command == "sink" && count == 6)
      return sink(std::stoi(words[2]), std::stoull(words[3]), std::stoull(words[4]),
                  std::stoi(words[5]));
    if (command != "run")
      throw std::runtime_error("usage: load run KEY=VALUE… | load sink PORT IN OUT THREADS");
    Options options;
    for (int i = 2; i < count; ++i) {
      std::string word = words[i];
      size_t at = word.find('=');
      if (at == std::string::npos) throw std::runtime_error("not KEY=VALUE: " + word);
      options[word.substr(0, at)] = word.substr(at + 1);
    }
    return run(options);
  } catch (const std::out_of_range&) {
    fprintf(stderr, "load: a required option is missing; see benchmarks/native_load/__init__.py\n");
  } catch (const std::exception& error) {
    fprintf(stderr, "load: %s\n", error.what());
  }
  return 1;
}
