// Decode attention over paged K/V on a CPU: one new token per row attends to its cached tokens.
//
// One work item is one (row, K/V head). The heads of its group share every read of K and V, which
// is what makes the kernel limited by memory and not by arithmetic. A context is walked in blocks
// of pages: scores of the block, softmax with a running maximum, weighted sum of V. Arithmetic is
// in float.
//
// The only torch header is the one for at::parallel_for: it keeps to torch.set_num_threads, and
// the file compiles in seconds.

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

using namespace exegpt;

constexpr int64_t kBlockTokens = 128;  // scores of a block stay in the first-level cache
constexpr int64_t kLineBytes = 64;
constexpr int64_t kTile = 4;  // heads of a group that go through a page together

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, page_size, num_pages, max_pages;
  int64_t group() const { return num_heads / num_kv_heads; }
};

// Buffers of one thread. `accumulated` and `query` hold group x head_dim, in the order
// that `place` gives.
struct Scratch {
  std::vector<float> query, accumulated, scores, maximum, total;
  std::vector<int64_t> place;  // of each element of a head in `query` and `accumulated`
  int64_t score_stride = 0;

  Scratch(const Shape& shape, int64_t block_tokens) {
    score_stride = (block_tokens + kLanes - 1) / kLanes * kLanes + kLanes;
    query.resize(shape.group() * shape.head_dim);
    accumulated.resize(query.size());
    scores.resize(shape.group() * score_stride);
    maximum.resize(shape.group());
    total.resize(shape.group());
  }
};

// What to fetch while the present page is worked on. Pages lie anywhere in memory, so the
// hardware's prefetcher starts anew on each.
template <typename Storage>
struct Upcoming {
  const Storage* page = nullptr;
  int64_t num_tokens = 0;

  // Always inlined: a function of prefetches alone has no effect to GCC, which drops its calls.
  __attribute__((always_inline)) void prefetch(int64_t token, int64_t count, int64_t dim) const {
    if (token >= num_tokens) return;
    const char* row = reinterpret_cast<const char*>(page + token * dim);
    const int64_t num_bytes = count * dim * int64_t(sizeof(Storage));
    for (int64_t byte = 0; byte < num_bytes; byte += kLineBytes) __builtin_prefetch(row + byte);
  }
};

// The two loops over a page are functions of their own, for then GCC keeps their sums in registers;
// inlined together it spilled them on every token. D is head_dim where it is one of the usual ones,
// known when compiling, which is a tenth faster; 0 is any other.

// Scores of one page for G heads, T tokens at a time: G * T independent sums hide the latency of
// a multiply-add. The last tile repeats the page's last token; what it writes past the end is
// overwritten by the next page or by the padding.
template <typename Element, int D, int G, int T>
__attribute__((noinline)) void score_page(
    const float* query, const typename Element::Storage* keys, int64_t num_tokens,
    int64_t any_head_dim, float* scores, int64_t score_stride,
    const Upcoming<typename Element::Storage>* upcoming) {
  static_assert(G * T % 4 == 0, "sums are taken four at a time");
  const int64_t head_dim = D ? D : any_head_dim;
  const int64_t paired = head_dim / kPair * kPair;
  for (int64_t token = 0; token < num_tokens; token += T) {
    const typename Element::Storage* row[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) row[t] = keys + std::min(token + t, num_tokens - 1) * head_dim;
    if (upcoming) upcoming->prefetch(token, T, head_dim);
    Vector sum[G * T] = {};
    for (int64_t d = 0; d < paired; d += kPair) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Vector q[G];
#pragma GCC unroll 16
        for (int g = 0; g < G; ++g) q[g] = load<Vector>(query + g * head_dim + d + half * kLanes);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const Vector key = Element::half(row[t] + d, half);
#pragma GCC unroll 16
          for (int g = 0; g < G; ++g) sum[g * T + t] += q[g] * key;
        }
      }
    }
    if (paired < head_dim) {
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        const Vector key = Element::single(row[t] + paired);
#pragma GCC unroll 16
        for (int g = 0; g < G; ++g)
          sum[g * T + t] += load<Vector>(query + g * head_dim + paired) * key;
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < G * T; i += 4) {
      const Quarter four = lane_sums(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
#pragma GCC unroll 16
      for (int j = 0; j < 4; ++j)
        scores[(i + j) / T * score_stride + token + (i + j) % T] = four[j];
    }
  }
}

// accumulated[g, d...] += sum over the page's tokens of weight[g, token] * value[token, d...],
// for P pairs of d, held in registers over the page.
template <typename Element, int D, int G, int P>
__attribute__((noinline)) void weigh_columns(
    const float* weights, int64_t weight_stride, const typename Element::Storage* values,
    int64_t num_tokens, int64_t any_head_dim, float* accumulated,
    const Upcoming<typename Element::Storage>* upcoming) {
  const int64_t head_dim = D ? D : any_head_dim;
  Vector sum[G * 2 * P] = {};
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (upcoming) upcoming->prefetch(token, 1, head_dim);
    float weight[G];
#pragma GCC unroll 16
    for (int g = 0; g < G; ++g) weight[g] = weights[g * weight_stride + token];
#pragma GCC unroll 16
    for (int i = 0; i < 2 * P; ++i) {
      const Vector value = Element::half(values + token * head_dim + i / 2 * kPair, i % 2);
#pragma GCC unroll 16
      for (int g = 0; g < G; ++g) sum[g * 2 * P + i] += weight[g] * value;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < G * 2 * P; ++i) {
    float* to = accumulated + i / (2 * P) * head_dim + i % (2 * P) * kLanes;
    store(to, load<Vector>(to) + sum[i]);
  }
}

template <typename Element, int D, int G, int P>
void weigh_page(const float* weights, int64_t weight_stride,
                const typename Element::Storage* values, int64_t num_tokens, int64_t head_dim,
                float* accumulated, const Upcoming<typename Element::Storage>* upcoming) {
  int64_t d = 0;
  for (; d + P * kPair <= head_dim; d += P * kPair) {
    weigh_columns<Element, D, G, P>(weights, weight_stride, values + d, num_tokens, head_dim,
                                 accumulated + d, upcoming);
    upcoming = nullptr;
  }
  for (; d + kPair <= head_dim; d += kPair) {
    weigh_columns<Element, D, G, 1>(weights, weight_stride, values + d, num_tokens, head_dim,
                                 accumulated + d, upcoming);
    upcoming = nullptr;
  }
  if (d == head_dim) return;
  for (int g = 0; g < G; ++g) {
    Vector sum = load<Vector>(accumulated + g * head_dim + d);
    for (int64_t token = 0; token < num_tokens; ++token)
      sum += weights[g * weight_stride + token] * Element::single(values + token * head_dim + d);
    store(accumulated + g * head_dim + d, sum);
  }
}

// Heads of a group go through a page four at a time, the last one to four together. Tiles are sized
// so that their sums fit the 16 vector registers of AVX2.
template <typename Element, int D>
void score_group(const Shape& shape, Scratch& scratch, const typename Element::Storage* keys,
                 int64_t num_tokens, int64_t offset,
                 const Upcoming<typename Element::Storage>* upcoming) {
  const int64_t dim = shape.head_dim, stride = scratch.score_stride, group = shape.group();
  for (int64_t g = 0; g < group; g += kTile) {
    const float* query = scratch.query.data() + g * dim;
    float* scores = scratch.scores.data() + g * stride + offset;
    switch (std::min(group - g, kTile)) {
      case 4:
        score_page<Element, D, 4, 2>(query, keys, num_tokens, dim, scores, stride, upcoming);
        break;
      case 3:
        score_page<Element, D, 3, 4>(query, keys, num_tokens, dim, scores, stride, upcoming);
        break;
      case 2:
        score_page<Element, D, 2, 4>(query, keys, num_tokens, dim, scores, stride, upcoming);
        break;
      default:
        score_page<Element, D, 1, 8>(query, keys, num_tokens, dim, scores, stride, upcoming);
    }
    upcoming = nullptr;
  }
}

template <typename Element, int D>
void weigh_group(const Shape& shape, Scratch& scratch, const typename Element::Storage* values,
                 int64_t num_tokens, int64_t offset,
                 const Upcoming<typename Element::Storage>* upcoming) {
  const int64_t dim = shape.head_dim, stride = scratch.score_stride, group = shape.group();
  for (int64_t g = 0; g < group; g += kTile) {
    const float* weights = scratch.scores.data() + g * stride + offset;
    float* sum = scratch.accumulated.data() + g * dim;
    switch (std::min(group - g, kTile)) {
      case 4:
        weigh_page<Element, D, 4, 1>(weights, stride, values, num_tokens, dim, sum, upcoming);
        break;
      case 3:
        weigh_page<Element, D, 3, 2>(weights, stride, values, num_tokens, dim, sum, upcoming);
        break;
      case 2:
        weigh_page<Element, D, 2, 2>(weights, stride, values, num_tokens, dim, sum, upcoming);
        break;
      default:
        weigh_page<Element, D, 1, 4>(weights, stride, values, num_tokens, dim, sum, upcoming);
    }
    upcoming = nullptr;
  }
}

// Scores of a block become weights exp(score - maximum); what was summed under a lower maximum is
// scaled down.
void softmax_block(const Shape& shape, Scratch& scratch, int64_t num_tokens) {
  const int64_t padded = (num_tokens + kLanes - 1) / kLanes * kLanes;
  for (int64_t g = 0; g < shape.group(); ++g) {
    float* scores = scratch.scores.data() + g * scratch.score_stride;
    std::fill(scores + num_tokens, scores + padded, -std::numeric_limits<float>::infinity());
    Vector highest = load<Vector>(scores);
    for (int64_t t = kLanes; t < padded; t += kLanes) {
      const Vector score = load<Vector>(scores + t);
      highest = score > highest ? score : highest;
    }
    float maximum = scratch.maximum[g];
    for (int i = 0; i < kLanes; ++i) maximum = std::max(maximum, highest[i]);
    if (maximum > scratch.maximum[g]) {
      const float scale = exp_negative(Vector{} + (scratch.maximum[g] - maximum))[0];
      float* accumulated = scratch.accumulated.data() + g * shape.head_dim;
      for (int64_t d = 0; d < shape.head_dim; ++d) accumulated[d] *= scale;
      scratch.total[g] *= scale;
      scratch.maximum[g] = maximum;
    }
    Vector sum = {};
    for (int64_t t = 0; t < padded; t += kLanes) {
      const Vector weight = exp_negative(load<Vector>(scores + t) - maximum);
      store(scores + t, weight);
      sum += weight;
    }
    for (int i = 0; i < kLanes; ++i) scratch.total[g] += sum[i];
  }
}

template <typename Element>
struct Attention {
  typedef typename Element::Storage Storage;
  Shape shape;
  const Storage* query;
  const Storage* k_pages;
  const Storage* v_pages;
  const int32_t* page_table;
  const int32_t* context_lens;
  Storage* output;
  float scale;

  Upcoming<Storage> page(const Storage* pages, int64_t row, int64_t kv_head, int64_t index) const {
    const int64_t id = page_table[row * shape.max_pages + index];
    const int64_t left = context_lens[row] - index * shape.page_size;
    return {pages + (id * shape.num_kv_heads + kv_head) * shape.page_size * shape.head_dim,
            std::min(left, shape.page_size)};
  }

  template <int D>
  void attend(int64_t item, int64_t last_item, int64_t block_pages, Scratch& scratch) const {
    const int64_t row = item / shape.num_kv_heads, kv_head = item % shape.num_kv_heads;
    const int64_t group = shape.group(), dim = shape.head_dim;
    const int64_t first = (row * shape.num_heads + kv_head * group) * dim;
    const int64_t* place = scratch.place.data();
    for (int64_t g = 0; g < group; ++g)
      for (int64_t d = 0; d < dim; ++d)
        scratch.query[g * dim + place[d]] = Element::widen(query[first + g * dim + d]) * scale;
    std::fill(scratch.accumulated.begin(), scratch.accumulated.end(), 0.0f);
    std::fill(scratch.total.begin(), scratch.total.end(), 0.0f);
    std::fill(scratch.maximum.begin(), scratch.maximum.end(),
              -std::numeric_limits<float>::infinity());

    const int64_t pages = (context_lens[row] + shape.page_size - 1) / shape.page_size;
    for (int64_t start = 0; start < pages; start += block_pages) {
      const int64_t stop = std::min(start + block_pages, pages);
      int64_t tokens = 0;
      Upcoming<Storage> now = page(k_pages, row, kv_head, start), next;
      for (int64_t index = start; index < stop; ++index, now = next) {
        next = index + 1 < stop ? page(k_pages, row, kv_head, index + 1)
                                : page(v_pages, row, kv_head, start);
        score_group<Element, D>(shape, scratch, now.page, now.num_tokens, tokens, &next);
        tokens += now.num_tokens;
      }
      softmax_block(shape, scratch, tokens);
      tokens = 0;
      for (int64_t index = start; index < stop; ++index, now = next) {
        if (index + 1 < stop) {
          next = page(v_pages, row, kv_head, index + 1);
        } else if (stop < pages) {
          next = page(k_pages, row, kv_head, stop);
        } else if (item + 1 < last_item) {
          next = page(k_pages, (item + 1) / shape.num_kv_heads, (item + 1) % shape.num_kv_heads, 0);
        } else {
          next = {};
        }
        weigh_group<Element, D>(shape, scratch, now.page, now.num_tokens, tokens, &next);
        tokens += now.num_tokens;
      }
    }
    for (int64_t g = 0; g < group; ++g) {
      const float inverse = 1.0f / scratch.total[g];
      for (int64_t d = 0; d < dim; ++d)
        output[first + g * dim + d] =
            Element::narrow(scratch.accumulated[g * dim + place[d]] * inverse);
    }
  }

  template <int D>
  void run(int64_t num_rows) const {
    const int64_t block_pages = std::max<int64_t>(1, kBlockTokens / shape.page_size);
    at::parallel_for(0, num_rows * shape.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(shape, block_pages * shape.page_size);
      const int64_t paired = shape.head_dim / kPair * kPair;
      for (int64_t d = 0; d < shape.head_dim; ++d)
        scratch.place.push_back(d < paired ? d / kPair * kPair + Element::lane_of(d % kPair) : d);
      for (int64_t item = begin; item < end; ++item) attend<D>(item, end, block_pages, scratch);
    });
  }
};

// 1 + the first row whose context or pages do not fit the cache, 0 if all do.
int64_t misfit(const Shape& shape, int64_t num_rows, const int32_t* page_table,
               const int32_t* context_lens) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t length = context_lens[row];
    if (length < 1 || length > shape.max_pages * shape.page_size) return row + 1;
    const int64_t pages = (length + shape.page_size - 1) / shape.page_size;
    for (int64_t index = 0; index < pages; ++index) {
      const int64_t id = page_table[row * shape.max_pages + index];
      if (id < 0 || id >= shape.num_pages) return row + 1;
    }
  }
  return 0;
}

}  // namespace

// Tensors as in decode_attention.py, all contiguous. Returns what `misfit` does; then nothing has
// been written.
extern "C" int64_t exegpt_decode_attention(
    const void* query, const void* k_pages, const void* v_pages, const int32_t* page_table,
    const int32_t* context_lens, void* output, int64_t num_rows, int64_t num_heads,
    int64_t num_kv_heads, int64_t head_dim, int64_t page_size, int64_t num_pages,
    int64_t max_pages, int64_t is_bfloat16, float scale) {
  const Shape shape{num_heads, num_kv_heads, head_dim, page_size, num_pages, max_pages};
  const int64_t row = misfit(shape, num_rows, page_table, context_lens);
  if (row) return row;
  const auto launch = [&](auto element) {
    typedef typename decltype(element)::Storage Storage;
    const Attention<decltype(element)> attention{
        shape, static_cast<const Storage*>(query), static_cast<const Storage*>(k_pages),
        static_cast<const Storage*>(v_pages), page_table, context_lens,
        static_cast<Storage*>(output), scale};
    switch (head_dim) {
      case 64:
        return attention.template run<64>(num_rows);
      case 128:
        return attention.template run<128>(num_rows);
      default:
        return attention.template run<0>(num_rows);
    }
  };
  if (is_bfloat16) {
    launch(BFloat16{});
  } else {
    launch(Float{});
  }
  return 0;
}
