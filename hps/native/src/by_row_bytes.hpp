// Copies of rows of common lengths are specialized; other lengths use the general one. 36, 68 and
// 132 bytes are int8 rows of dim 32, 64 and 128, and int4 rows of dim 64 and 128.
#pragma once

// Calls function<row length>(arguments...) for the length in `view`, 0 for an uncommon one.
#define HPS_BY_ROW_BYTES(function, ...)  \
  switch (view.row_bytes) {              \
    case 32:                             \
      return function<32>(__VA_ARGS__);  \
    case 36:                             \
      return function<36>(__VA_ARGS__);  \
    case 64:                             \
      return function<64>(__VA_ARGS__);  \
    case 68:                             \
      return function<68>(__VA_ARGS__);  \
    case 128:                            \
      return function<128>(__VA_ARGS__); \
    case 132:                            \
      return function<132>(__VA_ARGS__); \
    case 256:                            \
      return function<256>(__VA_ARGS__); \
    case 512:                            \
      return function<512>(__VA_ARGS__); \
    default:                             \
      return function<0>(__VA_ARGS__);   \
  }
