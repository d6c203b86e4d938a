// Appends new K/V rows to the paged cache on a CPU: a copy, so it knows bytes and no element type.

#include <ATen/Parallel.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kRowsPerTask = 128;  // fewer are copied sooner than a second thread wakes up

}  // namespace

// Rows of `key` and `value` are `*_stride` bytes apart and hold num_kv_heads x row_bytes. Returns 1
// + the first slot outside the cache, 0 if none is; then nothing has been written.
extern "C" int64_t exegpt_append_kv(const char* key, const char* value, char* k_pages,
                                    char* v_pages, const int64_t* slots, int64_t num_rows,
                                    int64_t key_stride, int64_t value_stride, int64_t num_pages,
                                    int64_t num_kv_heads, int64_t page_size, int64_t row_bytes) {
  for (int64_t row = 0; row < num_rows; ++row)
    if (slots[row] < 0 || slots[row] >= num_pages * page_size) return row + 1;
  at::parallel_for(0, num_rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t page = slots[row] / page_size, offset = slots[row] % page_size;
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        const int64_t to = ((page * num_kv_heads + head) * page_size + offset) * row_bytes;
        std::memcpy(k_pages + to, key + row * key_stride + head * row_bytes, row_bytes);
        std::memcpy(v_pages + to, value + row * value_stride + head * row_bytes, row_bytes);
      }
    }
  });
  return 0;
}
