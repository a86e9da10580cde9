#include "hps/resp.hpp"

#include <algorithm>
#include <cstring>

namespace hps {

namespace {

constexpr std::size_t kHeaderBytes = 9;  // version and flags
constexpr std::size_t kLongestLine = 65536;

// The end of the line at `data`, before \r\n; nullptr if it is not complete.
const char* end_of_line(const char* data, std::size_t size) {
  const char* from = data;
  const char* end = data + size;
  while (const void* found = std::memchr(from, '\r', end - from)) {
    const char* at = static_cast<const char*>(found);
    if (at + 1 == end) return nullptr;
    if (at[1] == '\n') return at;
    from = at + 1;
  }
  if (size > kLongestLine) throw ProtocolError("a reply line has no end");
  return nullptr;
}

std::int64_t parse_length(const char* from, const char* to) {
  const bool negative = from != to && *from == '-';
  if (negative) ++from;
  if (from == to || to - from > 10) throw ProtocolError("a reply has no length");
  std::int64_t value = 0;
  for (; from != to; ++from) {
    if (*from < '0' || *from > '9') throw ProtocolError("a reply has no length");
    value = 10 * value + (*from - '0');
  }
  return negative ? -value : value;
}

std::uint64_t little_endian(const char* bytes) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<std::uint8_t>(bytes[i]);
  return value;
}

}  // namespace

RowReplies::RowReplies(const RowTarget& target, const std::int64_t* counts, std::size_t replies,
                       const std::int64_t* positions)
    : target_(target), counts_(counts), replies_(replies), positions_(positions) {
  const std::size_t length = target.row_bytes + (target.versioned ? kHeaderBytes : 0);
  header_ = "$" + std::to_string(length) + "\r\n";
}

std::size_t RowReplies::feed(const char* data, std::size_t size) {
  std::size_t at = 0;
  const std::size_t row =
      header_.size() + (target_.versioned ? kHeaderBytes : 0) + target_.row_bytes;
  while (reply_ != replies_) {
    if (skip_ != 0) {
      const std::size_t skipped = std::min(skip_, size - at);
      at += skipped;
      skip_ -= skipped;
      if (skip_ != 0) return at;
      end_element();
      continue;
    }
    const char* next = data + at;
    const std::size_t left = size - at;
    std::size_t used = 0;
    if (element_ < 0) {
      used = begin_reply(next, left);
    } else if (left >= row + 2 && std::memcmp(next, header_.data(), header_.size()) == 0) {
      if (next[row] != '\r' || next[row + 1] != '\n')
        throw ProtocolError("a value does not end where it should");
      store(next + header_.size(), row - header_.size(), positions_[element_]);
      end_element();
      used = row + 2;
    } else {
      used = read_element(next, left);
    }
    if (used == 0) return at;
    at += used;
  }
  return at;
}

std::size_t RowReplies::begin_reply(const char* data, std::size_t size) {
  const char* end = end_of_line(data, size);
  if (end == nullptr) return 0;
  const std::size_t used = end + 2 - data;
  const std::int64_t count = counts_[reply_];
  if (*data == '-') {
    std::string text(data + 1, end);
    for (char& each : text)
      if (static_cast<unsigned char>(each) > 126) each = '?';
    errors_.emplace_back(reply_, std::move(text));
    next_reply();
  } else if (*data == '+' && count < 0) {
    next_reply();
  } else if (*data == '*' && count >= 0 && parse_length(data + 1, end) == count) {
    element_ = 0;
    if (count == 0) next_reply();
  } else {
    throw ProtocolError("a reply does not match the request");
  }
  return used;
}

std::size_t RowReplies::read_element(const char* data, std::size_t size) {
  const char* end = end_of_line(data, size);
  if (end == nullptr) return 0;
  const std::size_t line = end + 2 - data;
  if (*data == '_' && end == data + 1) {  // RESP3's null
    left_.push_back(positions_[element_]);
    end_element();
    return line;
  }
  if (*data != '$') throw ProtocolError("an element of a reply is not a value");
  const std::int64_t length = parse_length(data + 1, end);
  if (length < 0) {
    left_.push_back(positions_[element_]);
    end_element();
    return line;
  }
  const std::size_t bytes = static_cast<std::size_t>(length);
  const bool row = bytes == target_.row_bytes + (target_.versioned ? kHeaderBytes : 0);
  if (!row && !(target_.versioned && bytes == kHeaderBytes)) {
    wrong_length_ = std::max<std::size_t>(bytes, 1);
    left_.push_back(positions_[element_]);
    skip_ = bytes + 2;
    return line;
  }
  if (size < line + bytes + 2) return 0;
  if (data[line + bytes] != '\r' || data[line + bytes + 1] != '\n')
    throw ProtocolError("a value does not end where it should");
  store(data + line, bytes, positions_[element_]);
  end_element();
  return line + bytes + 2;
}

void RowReplies::store(const char* value, std::size_t length, std::int64_t position) {
  std::uint64_t version = 0;
  if (target_.versioned) {
    version = little_endian(value);
    if (length == kHeaderBytes) {
      if (version < target_.oldest_tombstone)
        left_.push_back(position);
      else
        target_.versions[position] = version;
      return;
    }
    if (version < target_.oldest_row) {
      left_.push_back(position);
      return;
    }
    value += kHeaderBytes;
  }
  std::memcpy(target_.rows + position * target_.row_bytes, value, target_.row_bytes);
  target_.versions[position] = version;
  target_.source[position] = target_.code;
}

void RowReplies::end_element() {
  if (++element_ == counts_[reply_]) next_reply();
}

void RowReplies::next_reply() {
  if (counts_[reply_] > 0) positions_ += counts_[reply_];
  element_ = -1;
  ++reply_;
}

}  // namespace hps
