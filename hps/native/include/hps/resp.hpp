// Rows out of Redis replies: what a server answers to several HMGETs, decoded as it comes in,
// straight into the caller's arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hps {

// The bytes are no answer to what was asked: the connection is of no use any more.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where rows go. A value is a row, with `versioned` behind u64 little-endian version and u8 flags;
// a versioned value of 9 bytes is a tombstone. Older ones than `oldest_row` and `oldest_tombstone`
// count as not there.
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

class RowReplies {
 public:
  // counts[i]: the elements of reply i, or -1 for a status line (+OK) that is skipped. `positions`:
  // the rows of the elements, reply by reply; both must outlive this object.
  RowReplies(const RowTarget& target, const std::int64_t* counts, std::size_t replies,
             const std::int64_t* positions);

  // Decodes what is complete of data[0..size) and returns how much that was; the caller hands in
  // the rest again with what follows it. Throws ProtocolError.
  std::size_t feed(const char* data, std::size_t size);

  bool done() const { return reply_ == replies_; }
  const std::vector<std::int64_t>& left() const { return left_; }
  const std::vector<std::pair<std::size_t, std::string>>& errors() const { return errors_; }
  // The length of a value that is none of this table's; 0 when there was none.
  std::size_t wrong_length() const { return wrong_length_; }

 private:
  std::size_t begin_reply(const char* data, std::size_t size);
  std::size_t element(const char* data, std::size_t size);
  void store(const char* value, std::size_t length, std::int64_t position);
  void end_element();
  void next_reply();

  RowTarget target_;
  const std::int64_t* counts_;
  std::size_t replies_;
  const std::int64_t* positions_;
  std::string header_;         // of an element that is a row: "$137\r\n"
  std::size_t reply_ = 0;      // the one being read
  std::int64_t element_ = -1;  // of it; -1 before its header
  std::size_t skip_ = 0;       // bytes of a value that does not belong here
  std::vector<std::int64_t> left_;
  std::vector<std::pair<std::size_t, std::string>> errors_;
  std::size_t wrong_length_ = 0;
};

}  // namespace hps
