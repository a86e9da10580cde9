// What ours is compared with: a C program that pipelines HMGETs over hiredis and copies the rows out.
//
//   redis_hmget PORT PARTITIONS ROW_BYTES NAME     NAME with %d for the partition: "hps:{m/1/t/p%d}v"
//
// Reads batches from its input: u64 count, then that many i64 keys. For each it prints the seconds from
// keys to rows and a checksum of them, on one line. Values begin with 9 bytes of version and flags.
#include <hiredis/hiredis.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kHeader = 9, kMostPartitions = 1024 };

static uint64_t rotate_right(uint64_t x, int r) { return (x >> r) | (x << (64 - r)); }

static uint64_t partition_hash(uint64_t x) {
  x ^= rotate_right(x, 25) ^ rotate_right(x, 50);
  x *= 0xA24BAED4963EE407ULL;
  x ^= rotate_right(x, 24) ^ rotate_right(x, 49);
  x *= 0x9FB21C651E98DF25ULL;
  return x ^ (x >> 28);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int partitions = atoi(argv[2]);
  const size_t row = atoi(argv[3]);
  redisContext* redis = redisConnect("127.0.0.1", atoi(argv[1]));
  if (redis == NULL || redis->err || partitions > kMostPartitions) return 1;

  uint64_t n, room = 0;
  int64_t* keys = NULL;
  char* rows = NULL;
  uint64_t* versions = NULL;
  uint32_t *part = NULL, *order = NULL;
  const char** arguments = NULL;
  size_t* lengths = NULL;
  while (fread(&n, 8, 1, stdin) == 1) {
    if (n > room) {
      room = n;
      keys = realloc(keys, n * 8);
      rows = realloc(rows, n * row);
      versions = realloc(versions, n * 8);
      part = realloc(part, n * 4);
      order = realloc(order, n * 4);
      arguments = realloc(arguments, (n + 2) * sizeof *arguments);
      lengths = realloc(lengths, (n + 2) * sizeof *lengths);
    }
    if (fread(keys, 8, n, stdin) != n) return 1;

    const double begin = now();
    uint64_t starts[kMostPartitions + 1] = {0};
    for (uint64_t i = 0; i < n; ++i) {
      part[i] = partition_hash((uint64_t)keys[i]) % partitions;
      ++starts[part[i] + 1];
    }
    for (int p = 0; p < partitions; ++p) starts[p + 1] += starts[p];
    uint64_t next[kMostPartitions];
    memcpy(next, starts, sizeof next);
    for (uint64_t i = 0; i < n; ++i) order[next[part[i]]++] = i;
    for (int p = 0; p < partitions; ++p) {
      const uint64_t count = starts[p + 1] - starts[p];
      if (count == 0) continue;
      char name[256];
      arguments[0] = "HMGET", lengths[0] = 5;
      arguments[1] = name, lengths[1] = snprintf(name, sizeof name, argv[4], p);
      for (uint64_t i = 0; i < count; ++i) {
        arguments[2 + i] = (const char*)&keys[order[starts[p] + i]];
        lengths[2 + i] = 8;
      }
      redisAppendCommandArgv(redis, count + 2, arguments, lengths);
    }
    for (int p = 0; p < partitions; ++p) {
      const uint64_t count = starts[p + 1] - starts[p];
      redisReply* reply;
      if (count == 0) continue;
      if (redisGetReply(redis, (void**)&reply) != REDIS_OK || reply->elements != count) return 1;
      for (uint64_t i = 0; i < count; ++i) {
        const redisReply* each = reply->element[i];
        const uint32_t at = order[starts[p] + i];
        if (each->type != REDIS_REPLY_STRING || each->len != row + kHeader) continue;
        memcpy(&versions[at], each->str, 8);
        memcpy(rows + at * row, each->str + kHeader, row);
      }
      freeReplyObject(reply);
    }
    const double seconds = now() - begin;

    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; ++i) {
      uint32_t first;
      memcpy(&first, rows + i * row, 4);
      sum = sum * 31 + first;
    }
    printf("%.9f %llu\n", seconds, (unsigned long long)sum);
    fflush(stdout);
  }
  return 0;
}
