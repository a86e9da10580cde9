// Decoder of rows in Redis replies: the replies to several HMGETs, decoded as they arrive, straight
// into the caller's arrays. NumPy twin: hps/native/twin_resp.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hps {

// The bytes are no reply to the request: the connection must be closed.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The arrays that rows are decoded into. A value is a row; if `versioned`, a u64 little-endian
// version and u8 flags precede it, and a value of 9 bytes is a tombstone. Rows older than
// `oldest_row` and tombstones older than `oldest_tombstone` count as absent.
struct RowTarget {
  std::uint8_t* rows;
  std::size_t row_bytes;
  std::uint64_t* versions;
  std::uint8_t* source;
  std::uint8_t code;
  bool versioned;
  std::uint64_t oldest_row;
  std::uint64_t oldest_tombstone;
};

// Not thread-safe.
class RowReplies {
 public:
  // counts[i]: the elements of reply i, or -1 for a status line (+OK) that is skipped. `positions`:
  // the rows of the elements, reply by reply; both must outlive this object.
  RowReplies(const RowTarget& target, const std::int64_t* counts, std::size_t replies,
             const std::int64_t* positions);

  // Decodes the complete part of data[0..size) and returns its length; the caller passes the rest
  // again with the bytes that follow it. Throws ProtocolError.
  std::size_t feed(const char* data, std::size_t size);

  bool done() const { return reply_ == replies_; }
  // The positions without row or tombstone, unordered.
  const std::vector<std::int64_t>& left() const { return left_; }
  const std::vector<std::pair<std::size_t, std::string>>& errors() const { return errors_; }
  // The length of a value that is no row of this table; 0: there was none.
  std::size_t wrong_length() const { return wrong_length_; }

 private:
  std::size_t begin_reply(const char* data, std::size_t size);
  std::size_t read_element(const char* data, std::size_t size);
  void store(const char* value, std::size_t length, std::int64_t position);
  void end_element();
  void next_reply();

  RowTarget target_;
  const std::int64_t* counts_;
  std::size_t replies_;
  const std::int64_t* positions_;
  std::string header_;         // the header of an element that is a row: "$137\r\n"
  std::size_t reply_ = 0;      // the current reply
  std::int64_t element_ = -1;  // its current element; -1 before the header
  std::size_t skip_ = 0;       // bytes left of a value of wrong length
  std::vector<std::int64_t> left_;
  std::vector<std::pair<std::size_t, std::string>> errors_;
  std::size_t wrong_length_ = 0;
};

}  // namespace hps
