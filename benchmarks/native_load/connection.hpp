// One connection of the load generator: sends a patched copy of a prepared request, reads the
// answer.
#pragma once

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// Bytes of a request that differ in each: `count` 64-bit keys below `limit`; without a limit,
// 32-bit floats: the keys of the patch `source`, or numbers in [-1, 1) if that is negative. Keys are
// uniform, or with `skew` the limit times the product of so many further uniform numbers.
struct Patch {
  size_t offset, count;
  uint64_t limit;
  int source, skew;
};

struct Request {
  std::string message;  // HTTP: head and body; gRPC: prefix and message; raw: any bytes
  std::string head;     // gRPC: the HPACK block of a call
  std::vector<Patch> patches;
  size_t answer_bytes = 0;  // raw: size of an answer
  size_t zeros = 0;         // bytes at the end of an answer that must be zero
};

inline uint64_t mix(uint64_t x) {  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

inline void patch(char* message, const std::vector<Patch>& patches, uint64_t& seed) {
  for (const Patch& each : patches) {
    char* at = message + each.offset;
    uint64_t first = seed;
    seed += each.count * 0x9e3779b97f4a7c15ull;
    for (size_t i = 0; i < each.count; ++i) {
      uint64_t random = mix(first + i * 0x9e3779b97f4a7c15ull);
      if (each.limit) {
        uint64_t key = ((random >> 32) * each.limit) >> 32;
        for (int k = 0; k < each.skew; ++k) key = ((random = mix(random + 1)) >> 32) * key >> 32;
        memcpy(at + 8 * i, &key, 8);
      } else {
        float value = static_cast<float>(static_cast<int32_t>(random >> 32)) * 0x1p-31f;
        if (each.source >= 0) {
          uint64_t key;
          memcpy(&key, message + patches[static_cast<size_t>(each.source)].offset + 8 * i, 8);
          value = static_cast<float>(key);
        }
        memcpy(at + 4 * i, &value, 4);
      }
    }
  }
}

class Connection {
 public:
  Connection(const Request& request, uint64_t seed) : request_(request), seed_(seed) {}
  virtual ~Connection() { disconnect(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void connect(const sockaddr_in& address, int poll) {
    disconnect();
    reset();
    poll_ = poll;
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd_ < 0 || ::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address))
      throw std::runtime_error(std::string("connection failed: ") + strerror(errno));
    int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    greet();
    epoll_event event{EPOLLIN, {.ptr = this}};
    epoll_ctl(poll_, EPOLL_CTL_ADD, fd_, &event);
    if (message_.empty()) {
      message_ = request_.message;
      refresh();
    }
  }

  // Send the prepared message; `sample`: leave it in `message()`, and the answer in `answer`.
  void send_next(bool sample) {
    answer.clear();
    is_sample = sample;
    begin();
    write();
  }

  // Make the next message; only once the present one is sent and, if it is a sample, taken.
  void refresh() {
    patch(message_.data(), request_.patches, seed_);
    prepared_ = true;
  }

  bool can_refresh() const { return !prepared_ && !is_sample && is_sent(); }
  // True if the answer ends with the zeros that it must end with.
  bool is_right() const {
    size_t zeros = request_.zeros;
    return answer.size() >= zeros && std::all_of(answer.end() - static_cast<ptrdiff_t>(zeros),
                                                 answer.end(), [](char each) { return each == 0; });
  }
  bool prepared() const { return prepared_; }
  const std::string& message() const { return message_; }

  // Send and receive without blocking. Returns the status of an answer that is complete now, else
  // 0; 200 is OK. Throws std::runtime_error if the server closes the connection or breaks the
  // protocol.
  int handle(uint32_t events, std::vector<char>& scratch) {
    int status = 0;
    if (events & ~static_cast<uint32_t>(EPOLLOUT)) {
      ssize_t size = recv(fd_, scratch.data(), scratch.size(), MSG_DONTWAIT);
      if (size == 0) throw std::runtime_error("the server closed the connection");
      if (size < 0 && errno != EAGAIN)
        throw std::runtime_error(std::string("receive: ") + strerror(errno));
      if (size > 0) status = take(scratch.data(), static_cast<size_t>(size));
    }
    write();
    if (status && !is_sent())
      throw std::runtime_error("answered before the whole request was sent: " + answer);
    return status;
  }

  bool is_sample = false;
  int64_t started = 0;  // ns
  size_t received = 0;  // bytes of the present answer
  std::string answer;

 protected:
  virtual void greet() {}            // after connecting
  virtual void reset() {}            // before connecting
  virtual void begin() = 0;          // a new call
  virtual bool fill() = 0;           // give `out_` bytes to send; false if there are none
  virtual bool is_sent() const = 0;  // the whole message
  virtual int take(const char* data, size_t n) = 0;  // received bytes

  void keep(const char* data, size_t n) {
    received += n;
    if (is_sample || request_.zeros) answer.append(data, n);
  }

  void write() {
    while (fill()) {
      ssize_t size = send(fd_, out_, out_size_, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (size < 0) {
        if (errno != EAGAIN) throw std::runtime_error(std::string("send: ") + strerror(errno));
        return watch(true);
      }
      out_ += size;
      out_size_ -= static_cast<size_t>(size);
    }
    watch(false);
  }

  const Request& request_;
  std::string message_;
  const char* out_ = nullptr;
  size_t out_size_ = 0;
  bool prepared_ = false;
  int fd_ = -1;

 private:
  void watch(bool writable) {
    if (writable == writable_) return;
    writable_ = writable;
    epoll_event event{EPOLLIN | (writable ? EPOLLOUT : 0u), {.ptr = this}};
    epoll_ctl(poll_, EPOLL_CTL_MOD, fd_, &event);
  }

  void disconnect() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
    out_size_ = 0;
    writable_ = false;
  }

  uint64_t seed_;
  bool writable_ = false;
  int poll_ = -1;
};

// A fixed number of bytes answers the message.
class RawConnection : public Connection {
 public:
  using Connection::Connection;

 protected:
  void begin() override {
    out_ = message_.data();
    out_size_ = message_.size();
    received = 0;
    prepared_ = false;
  }
  bool fill() override { return out_size_ > 0; }
  bool is_sent() const override { return out_size_ == 0; }
  int take(const char* data, size_t n) override {
    keep(data, n);
    return received >= request_.answer_bytes ? 200 : 0;
  }
};

// HTTP/1.1 with keep-alive; answers must have a Content-Length.
class HttpConnection : public RawConnection {
 public:
  using RawConnection::RawConnection;

 protected:
  void reset() override { begin_answer(); }
  void begin() override {
    RawConnection::begin();
    begin_answer();
  }
  int take(const char* data, size_t n) override {
    keep(data, n);
    if (!total_) {
      head_.append(data, std::min<size_t>(n, 1 << 16));
      size_t end = head_.find("\r\n\r\n");
      if (end == std::string::npos) return 0;
      total_ = end + 4 + content_length(end);
    }
    if (received < total_) return 0;
    return std::atoi(head_.c_str() + 9);
  }

 private:
  void begin_answer() {
    head_.clear();
    total_ = 0;
  }
  size_t content_length(size_t end) {
    static const char name[] = "\r\ncontent-length:";
    for (size_t at = 0; at + sizeof name < end; ++at)
      if (strncasecmp(head_.data() + at, name, sizeof name - 1) == 0)
        return strtoull(head_.data() + at + sizeof name - 1, nullptr, 10);
    throw std::runtime_error("an answer without Content-Length: " + head_.substr(0, end));
  }

  std::string head_;
  size_t total_ = 0;  // bytes of head and body; 0: not known yet
};

// gRPC over HTTP/2 without TLS (RFC 9113): unary calls, one at a time, no header compression. Frames
// may be as large as grpc's own clients (C++, Python) allow: smaller ones cost the server a tenth
// of a large answer.
class GrpcConnection : public Connection {
 public:
  using Connection::Connection;

 protected:
  enum Kind { DATA = 0, HEADERS = 1, RESET = 3, SETTINGS = 4, PING = 6, GOAWAY = 7, WINDOW = 8 };
  static constexpr int64_t kFirstWindow = 65535, kMostWindow = (1u << 31) - 1;
  static constexpr int64_t kLargestFrame = 4 << 20;

  void reset() override {
    stream_ = -1;
    window_ = call_window_ = new_window_ = kFirstWindow;
    largest_frame_ = 16384;
    taken_ = 0;
    wire_.clear();
    left_ = 0;
    frame_.clear();
  }

  void greet() override {
    wire_ = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    std::string settings{"\0\1\0\0\0\0", 6};  // no dynamic table
    settings += std::string("\0\4", 2) + number(kMostWindow);  // the window of calls
    settings += std::string("\0\5", 2) + number(kLargestFrame);
    frame(SETTINGS, 0, 0, settings);
    frame(WINDOW, 0, 0, number(kMostWindow - kFirstWindow));
  }

  void begin() override {
    stream_ += 2;
    call_window_ = new_window_;
    left_ = message_.size();
    calling_ = true;
    prepared_ = false;
    received = 0;
    frame(HEADERS, 4, stream_, request_.head);
  }

  bool fill() override {
    if (out_size_) return true;
    if (out_) wire_.clear();  // all of it is sent
    while (left_ && wire_.size() < (1 << 18)) {
      int64_t size = std::min({static_cast<int64_t>(left_), window_, call_window_, largest_frame_});
      if (size <= 0) break;
      window_ -= size;
      call_window_ -= size;
      bool last = static_cast<size_t>(size) == left_;
      frame_head(static_cast<size_t>(size), DATA, last, stream_);
      wire_.append(message_.data() + message_.size() - left_, static_cast<size_t>(size));
      left_ -= static_cast<size_t>(size);
    }
    out_ = wire_.empty() ? nullptr : wire_.data();
    out_size_ = wire_.size();
    return out_size_ > 0;
  }

  bool is_sent() const override { return left_ == 0; }

  int take(const char* data, size_t n) override {
    int status = 0;
    while (n) {
      if (frame_.size() < 9) {
        size_t more = std::min(n, 9 - frame_.size());
        frame_.append(data, more);
        data += more;
        n -= more;
        if (frame_.size() < 9) break;
        auto* head = reinterpret_cast<const unsigned char*>(frame_.data());
        frame_left_ = static_cast<size_t>(head[0]) << 16 | head[1] << 8 | head[2];
      }
      size_t more = std::min(n, frame_left_);
      if (frame_[3] == DATA)
        keep(data, more);
      else
        frame_.append(data, more);
      taken_ += frame_[3] == DATA ? more : 0;
      data += more;
      n -= more;
      frame_left_ -= more;
      if (frame_left_) break;
      if (int ended = take_frame()) status = ended;
      frame_.clear();
    }
    return status;
  }

 private:
  static std::string number(int64_t value) {
    uint32_t big = htonl(static_cast<uint32_t>(value));
    return {reinterpret_cast<char*>(&big), 4};
  }

  uint32_t payload_number(size_t at) const {
    uint32_t big = 0;
    if (frame_.size() >= 9 + at + 4) memcpy(&big, frame_.data() + 9 + at, 4);
    return ntohl(big);
  }

  // Control frames may be added while earlier bytes are unsent: those bytes move to the front.
  void frame_head(size_t size, int kind, int flags, int64_t stream) {
    if (out_) {
      wire_.erase(0, wire_.size() - out_size_);
      out_ = nullptr;
      out_size_ = 0;
    }
    const char head[] = {static_cast<char>(size >> 16), static_cast<char>(size >> 8),
                         static_cast<char>(size), static_cast<char>(kind),
                         static_cast<char>(flags)};
    wire_.append(head, 5).append(number(stream));
  }

  void frame(int kind, int flags, int64_t stream, const std::string& payload) {
    frame_head(payload.size(), kind, flags, stream);
    wire_ += payload;
  }

  int take_frame() {
    auto kind = frame_[3], flags = frame_[4];
    uint32_t stream = 0;
    memcpy(&stream, frame_.data() + 5, 4);
    bool ours = static_cast<int64_t>(ntohl(stream)) == stream_;
    if (kind == DATA && taken_ > (1u << 30)) {
      frame(WINDOW, 0, 0, number(static_cast<int64_t>(taken_)));
      taken_ = 0;
    } else if (kind == HEADERS && flags & 1 && ours) {
      return ended();
    } else if (kind == WINDOW) {
      (stream == 0 ? window_ : call_window_) += stream == 0 || ours ? payload_number(0) : 0;
    } else if (kind == SETTINGS && !(flags & 1)) {
      settle();
      frame(SETTINGS, 1, 0, "");
    } else if (kind == PING && !(flags & 1)) {
      frame(PING, 1, 0, frame_.substr(9));
    } else if (kind == GOAWAY || (kind == RESET && ours && calling_)) {
      throw std::runtime_error("the server ended the call: " + frame_.substr(9));
    }
    return 0;
  }

  void settle() {
    for (size_t at = 0; 9 + at + 6 <= frame_.size(); at += 6) {
      int name = static_cast<unsigned char>(frame_[9 + at + 1]);
      int64_t value = payload_number(at + 2);
      if (name == 4) {
        call_window_ += value - new_window_;
        new_window_ = value;
      } else if (name == 5) {
        largest_frame_ = value;
      }
    }
  }

  // gRPC's servers write headers without Huffman coding, and our settings allow no dynamic table.
  int ended() {
    calling_ = false;
    static const std::string name = "\x0bgrpc-status";
    size_t at = frame_.find(name);
    if (at == std::string::npos) throw std::runtime_error("trailers without a status");
    int status = std::atoi(
        frame_.substr(at + name.size() + 1, static_cast<size_t>(frame_[at + name.size()])).c_str());
    if (left_) {
      left_ = 0;
      frame(RESET, 0, stream_, std::string(4, '\0'));
    }
    if (status == 0 && received < 5) throw std::runtime_error("OK without a message");
    return status ? status : 200;
  }

  int64_t stream_ = -1, window_ = 0, call_window_ = 0, new_window_ = 0, largest_frame_ = 16384;
  bool calling_ = false;
  uint64_t taken_ = 0;
  size_t left_ = 0, frame_left_ = 0;
  std::string wire_, frame_;
};
