// Attention of one step over static KV slots, for a CPU: what function.attend_spans does, in one operator.
//
// A row is one query head of one token. It is computed from its own query and the rows of its slot that its bias leaves
// in sight, in blocks of 32 from the slot's first row on and in one order of sums, so it has the same bits in any
// company: alone, among a prompt's or a tree's, whatever the threads. Sums are in float32, and so are products; where the
// processor multiplies pairs of bfloat16, weights of values are rounded to it, as torch's kernel does.
//
// A tree's rows see the slot as if their path stood in it as a chain. Up to the root all of them share each block; behind
// it a block is put together for each path from the nodes' own rows.
//
// Keys and values are fetched into the second-level cache a block ahead: the processor's own guess ends at each 4 KiB.
//
// Legend: T tokens of the step, H KV heads, G query heads of each, S rows of a slot, D size of a key, E size of a value.

#include <algorithm>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "tensors.h"

namespace {

using namespace specsplit;

constexpr int KEYS = 32;   // keys of a block
constexpr int ROWS = 32;   // rows that share what is read of a block
constexpr int TILE = 4;    // rows that are multiplied together
constexpr int LINE = 64;   // bytes of a line of the caches
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// Whether two numbers that lie side by side, as one word, are multiplied at a time.
#ifdef __AVX512BF16__
template <typename Item>
constexpr bool BY_PAIRS = std::is_same<Item, BFloat16>::value;
#else
template <typename Item>
constexpr bool BY_PAIRS = false;
#endif
// What queries and turned keys are held as, and how many numbers of a row one of them has.
template <typename Item>
using Operand = typename std::conditional<BY_PAIRS<Item>, uint32_t, float>::type;
template <typename Item>
constexpr int WIDTH = BY_PAIRS<Item> ? 2 : 1;

inline float largest(Floats vector) {
  float items[LANES];
  store(items, vector);
  return *std::max_element(items, items + LANES);
}

template <typename Vector>
inline void transpose(Vector (&rows)[LANES]) {
#define ZIP(a, b, first) \
  __builtin_shufflevector(a, b, first, first + 16, first + 1, first + 17, first + 2, first + 18, first + 3, first + 19, \
                          first + 4, first + 20, first + 5, first + 21, first + 6, first + 22, first + 7, first + 23)
  for (int stage = 0; stage < 4; ++stage) {
    Vector zipped[LANES];
    for (int i = 0; i < LANES / 2; ++i) {
      zipped[2 * i] = ZIP(rows[i], rows[i + LANES / 2], 0);
      zipped[2 * i + 1] = ZIP(rows[i], rows[i + LANES / 2], 8);
    }
    for (int i = 0; i < LANES; ++i) rows[i] = zipped[i];
  }
#undef ZIP
}

// Write 16 numbers or pairs of 16 keys to columns[number][key].
template <typename Item>
inline void turn_part(const Item* keys, int64_t stride, Operand<Item>* columns) {
  typename std::conditional<BY_PAIRS<Item>, Words, Floats>::type rows[LANES];
  for (int i = 0; i < LANES; ++i)
    if constexpr (BY_PAIRS<Item>) rows[i] = load<Words>(keys + i * stride);
    else rows[i] = floats(keys + i * stride);
  transpose(rows);
  for (int i = 0; i < LANES; ++i) store(columns + i * KEYS, rows[i]);
}

// Write KEYS keys [KEYS, size] to columns [size / WIDTH, KEYS].
template <typename Item>
void turn(const Item* keys, int64_t stride, int size, Operand<Item>* columns) {
  for (int key = 0; key < KEYS; key += LANES)
    for (int d = 0; d < size / WIDTH<Item>; d += LANES)
      turn_part(keys + key * stride + d * WIDTH<Item>, stride, columns + d * KEYS + key);
}

// The lines of rows that are needed soon, fetched one by one between the products.
struct Ahead {
  const char* row;
  int64_t stride;
  int num_bytes, num_rows, place = 0;

  inline void fetch() {
    if (num_rows == 0) return;
    __builtin_prefetch(row + place, 0, 2);
    place += LINE;
    if (place >= num_bytes) place = 0, row += stride, --num_rows;
  }
};

inline void add_product(Floats& sums, Floats numbers, float factor) { sums += numbers * factor; }
#ifdef __AVX512BF16__
inline void add_product(Floats& sums, Words pairs, uint32_t factors) {
  sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(int(factors)));
}
#endif

// Write the products of N queries [N, size] and KEYS keys to scores [N, KEYS]; queries and keys are numbers or pairs.
template <int N, typename Number>
void score(const Number* queries, int size, const Number* columns, float* scores, Ahead& ahead) {
  typedef typename std::conditional<std::is_same<Number, float>::value, Floats, Words>::type Numbers;
  Floats sums[N][2] = {};
  for (int d = 0; d < size; ++d) {
    ahead.fetch();
    const Numbers first = load<Numbers>(columns + d * KEYS), second = load<Numbers>(columns + d * KEYS + LANES);
    for (int i = 0; i < N; ++i) {
      add_product(sums[i][0], first, queries[i * size + d]);
      add_product(sums[i][1], second, queries[i * size + d]);
    }
  }
  for (int i = 0; i < N; ++i) store(scores + i * KEYS, sums[i][0]), store(scores + i * KEYS + LANES, sums[i][1]);
}

// Add to results [N, size] the values [KEYS, size] by N rows of weights [N, KEYS].
template <int N, typename Item>
void gather(const float* weights, const Item* values, int64_t stride, int size, float* results, Ahead& ahead) {
  int d = 0;
  for (; d + 4 * LANES <= size; d += 4 * LANES) {
    Floats sums[N][4] = {};
    for (int key = 0; key < KEYS; ++key) {
      ahead.fetch();
      ahead.fetch();
      Floats parts[4];
      for (int part = 0; part < 4; ++part) parts[part] = floats(values + key * stride + d + part * LANES);
      for (int i = 0; i < N; ++i)
        for (int part = 0; part < 4; ++part) sums[i][part] += parts[part] * weights[i * KEYS + key];
    }
    for (int i = 0; i < N; ++i)
      for (int part = 0; part < 4; ++part) add_to(results + i * size + d + part * LANES, sums[i][part]);
  }
  for (; d < size; d += LANES)
    for (int i = 0; i < N; ++i) {
      Floats sums[2] = {};
      for (int key = 0; key < KEYS; ++key)
        sums[key % 2] += floats(values + key * stride + d) * weights[i * KEYS + key];
      add_to(results + i * size + d, sums[0] + sums[1]);
    }
}

#ifdef __AVX512BF16__
// As above, by pairs of keys, with weights [N, KEYS] of which the first KEYS / 2 words of a row are pairs.
template <int N>
void gather(const float* weights, const BFloat16* values, int64_t stride, int size, float* results, Ahead& ahead) {
#define PAIRS(first) first, first + 32, first + 1, first + 33, first + 2, first + 34, first + 3, first + 35
  for (int d = 0; d < size; d += 2 * LANES) {
    Floats sums[N][2] = {};
    for (int key = 0; key < KEYS; key += 2) {
      ahead.fetch();
      ahead.fetch();
      const ShortPairs even = load<ShortPairs>(values + key * stride + d);
      const ShortPairs odd = load<ShortPairs>(values + (key + 1) * stride + d);
      const Words first = (Words)__builtin_shufflevector(even, odd, PAIRS(0), PAIRS(4), PAIRS(8), PAIRS(12));
      const Words second = (Words)__builtin_shufflevector(even, odd, PAIRS(16), PAIRS(20), PAIRS(24), PAIRS(28));
      for (int i = 0; i < N; ++i) {
        const uint32_t pair = reinterpret_cast<const uint32_t*>(weights + i * KEYS)[key / 2];
        add_product(sums[i][0], first, pair);
        add_product(sums[i][1], second, pair);
      }
    }
    for (int i = 0; i < N; ++i)
      for (int part = 0; part < 2; ++part) add_to(results + i * size + d + part * LANES, sums[i][part]);
  }
#undef PAIRS
}
#endif

struct Strides {
  int64_t first, head, row;
  explicit Strides(const Tensor& x) : first(x.stride(0)), head(x.stride(1)), row(x.stride(2)) {}
};

// A token that is attended for: where its bias lies, and its path (-1: the slot as it is).
struct Query {
  int64_t token, bias;
  int path;
};

// Queries that see the same slot. `nodes` [paths, depth] are the slot's rows that stand at first_row + depth for a path.
struct Group {
  int64_t slot, end_row, first_row, depth;
  std::vector<int64_t> nodes;
  std::vector<Query> queries;
};

// Return what a span (metadata.AttentionMetadata) asks for, as groups behind those that are there.
void add_groups(const int64_t* span, const int64_t* tables, std::vector<Group>& groups) {
  const int64_t slot = span[0], start = span[1], stop = span[2], first_row = span[3], end_row = span[4];
  const int64_t offset = span[6], width = span[7], num_slots = span[8], num_paths = span[9], depth = span[10];
  if (num_paths == 0) {
    for (int64_t i = 0; i < num_slots; ++i) {
      Group group{slot + i, end_row, end_row, 0, {}, {}};
      const int64_t first = num_slots > 1 ? start + i : start, last = num_slots > 1 ? first + 1 : stop;
      for (int64_t token = first; token < last; ++token)
        group.queries.push_back({token, offset + (token - start) * end_row, -1});
      groups.push_back(std::move(group));
    }
    return;
  }
  const int64_t *nodes = tables + span[11], *tokens = nodes + num_paths * depth;
  Group group{slot, end_row, first_row, depth, {}, {}};
  for (int64_t i = 0; i < num_paths * depth; ++i) group.nodes.push_back(first_row + nodes[i] - start);
  for (int64_t path = 0; path < num_paths; ++path)
    for (int64_t i = 0; i < width; ++i) {
      const int64_t token = tokens[path * width + i];
      if (i > 0 && token == tokens[path * width + i - 1]) break;  // repeats fill the table up
      group.queries.push_back({token, offset + (path * width + i) * end_row, int(path)});
    }
  groups.push_back(std::move(group));
}

struct Scale {
  float scaling, softcap;
  const float* sinks;  // [query heads], or none
};

template <typename Item>
struct Step {
  const Item *q, *biases;
  const Item *keys, *values;
  Item* out;  // [T, query heads, E]
  Strides queries, key_rows, value_rows;
  int num_heads, group, key_size, value_size;
  Scale scale;
};

template <typename Item>
inline int padded(int size) {
  const int multiple = LANES * WIDTH<Item>;
  return (size + multiple - 1) / multiple * multiple;
}

// Up to ROWS rows of a group, and what has been found of them so far.
template <typename Item>
class Rows {
 public:
  explicit Rows(const Step<Item>& step)
      : step_(step), key_size_(padded<Item>(step.key_size)), value_size_(padded<Item>(step.value_size)),
        num_operands_(key_size_ / WIDTH<Item>), operands_(size_t(num_operands_) * (KEYS + ROWS) + LANES),
        floats_(size_t(ROWS) * (KEYS + value_size_)), items_(size_t(KEYS) * (key_size_ + value_size_)) {
    const uintptr_t place = reinterpret_cast<uintptr_t>(operands_.data());
    columns_ = operands_.data() + (LINE - place % LINE) % LINE / sizeof(Operand<Item>);
    queries_ = columns_ + num_operands_ * KEYS;
    scores_ = floats_.data(), results_ = scores_ + ROWS * KEYS;
    own_keys_ = items_.data(), own_values_ = own_keys_ + KEYS * key_size_;
  }

  // Attend for the rows from `first` on of a group's queries by query heads, with one KV head.
  void attend(const Group& group, int head, int first) {
    begin(group, head, first);
    const Item* keys = step_.keys + group.slot * step_.key_rows.first + head * step_.key_rows.head;
    const Item* values = step_.values + group.slot * step_.value_rows.first + head * step_.value_rows.head;
    for (int64_t row = 0; row < group.end_row; row += KEYS) {
      if (row + KEYS <= group.first_row) {
        attend_block(keys, values, row, group.end_row, 0, count_, nullptr);
        continue;
      }
      for (int i = 0, last; i < count_; i = last) {
        const int path = paths_[i];
        for (last = i; last < count_ && paths_[last] == path;) ++last;
        attend_block(keys, values, row, group.end_row, i, last, path < 0 ? nullptr : &group);
      }
    }
    end(group, head, first);
  }

 private:
  void begin(const Group& group, int head, int first) {
    count_ = std::min<int64_t>(ROWS, int64_t(group.queries.size()) * step_.group - first);
    std::fill(queries_, queries_ + count_ * num_operands_, Operand<Item>(0));
    std::fill(results_, results_ + count_ * value_size_, 0.0f);
    for (int i = 0; i < count_; ++i) {
      const Query& query = group.queries[(first + i) / step_.group];
      const int query_head = head * step_.group + (first + i) % step_.group;
      const Item* from = step_.q + query_head * step_.queries.head + query.token * step_.queries.row;
      Operand<Item>* query_row = queries_ + i * num_operands_;
      if constexpr (BY_PAIRS<Item>) std::memcpy(query_row, from, step_.key_size * sizeof(Item));
      else std::transform(from, from + step_.key_size, query_row, [](Item item) { return number(item); });
      biases_[i] = step_.biases + query.bias, paths_[i] = query.path;
      most_[i] = HIDDEN, mass_[i] = Floats{};
    }
  }

  // Attend, for the rows from i to last, to the block of the slot from `row` on; with a group, as their path has it.
  void attend_block(const Item* keys, const Item* values, int64_t row, int64_t end_row, int i, int last, const Group* group) {
    while (i < last && !sees(i, row, end_row)) ++i;
    while (i < last && !sees(last - 1, row, end_row)) --last;
    if (i == last) return;
    const Strides &k = step_.key_rows, &v = step_.value_rows;
    const int64_t next = std::min(row + KEYS, end_row), num_next = std::min<int64_t>(KEYS, end_row - next);
    Ahead next_keys{reinterpret_cast<const char*>(keys + next * k.row), int64_t(k.row * sizeof(Item)),
                    int(step_.key_size * sizeof(Item)), int(num_next)};
    Ahead next_values{reinterpret_cast<const char*>(values + next * v.row), int64_t(v.row * sizeof(Item)),
                      int(step_.value_size * sizeof(Item)), int(num_next)};
    const Item *block_keys = keys + row * k.row, *block_values = values + row * v.row;
    int64_t key_stride = k.row, value_stride = v.row;
    if (group || row + KEYS > end_row || key_size_ != step_.key_size || value_size_ != step_.value_size) {
      put_together(keys, values, row, end_row, group, paths_[i]);
      block_keys = own_keys_, block_values = own_values_, key_stride = key_size_, value_stride = value_size_;
    }
    turn(block_keys, key_stride, key_size_, columns_);
    for (int row_of_tile = i; row_of_tile < last; row_of_tile += TILE)
      by_count(last - row_of_tile, [&](auto count) {
        score<count>(queries_ + row_of_tile * num_operands_, num_operands_, columns_, scores_ + row_of_tile * KEYS,
                     next_keys);
      });
    for (int each = i; each < last; ++each) weigh(each, row, end_row);
    for (int row_of_tile = i; row_of_tile < last; row_of_tile += TILE)
      by_count(last - row_of_tile, [&](auto count) {
        gather<count>(scores_ + row_of_tile * KEYS, block_values, value_stride, value_size_,
                      results_ + row_of_tile * value_size_, next_values);
      });
  }

  template <typename Function>
  static void by_count(int count, const Function& function) {
    switch (count) {
      case 1: return function(std::integral_constant<int, 1>());
      case 2: return function(std::integral_constant<int, 2>());
      case 3: return function(std::integral_constant<int, 3>());
      default: return function(std::integral_constant<int, TILE>());
    }
  }

  bool sees(int i, int64_t row, int64_t end_row) const {
    const int count = std::min<int64_t>(KEYS, end_row - row);
    return std::any_of(biases_[i] + row, biases_[i] + row + count, [](Item item) { return number(item) > HIDDEN; });
  }

  // Copy a block as a path has it, with zeros behind the slot's end and behind each row.
  void put_together(const Item* keys, const Item* values, int64_t row, int64_t end_row, const Group* group, int path) {
    std::memset(static_cast<void*>(items_.data()), 0, items_.size() * sizeof(Item));
    for (int i = 0; i < std::min<int64_t>(KEYS, end_row - row); ++i) {
      int64_t from = row + i;
      if (group && from >= group->first_row && from < group->first_row + group->depth)
        from = group->nodes[path * group->depth + from - group->first_row];
      std::copy_n(keys + from * step_.key_rows.row, step_.key_size, own_keys_ + i * key_size_);
      std::copy_n(values + from * step_.value_rows.row, step_.value_size, own_values_ + i * value_size_);
    }
  }

  // Turn a row's scores of a block into weights, relative to its largest score so far.
  void weigh(int i, int64_t row, int64_t end_row) {
    float bias[KEYS];
    for (int key = 0; key < KEYS; ++key) bias[key] = row + key < end_row ? number(biases_[i][row + key]) : HIDDEN;
    Floats scores[2];
    for (int part = 0; part < 2; ++part) {
      const float cap = step_.scale.softcap, scaling = cap == 0.0f ? step_.scale.scaling : cap;
      scores[part] = load<Floats>(scores_ + i * KEYS + part * LANES);
      if (cap != 0.0f) scores[part] = hyperbolic_tangent(scores[part] * (step_.scale.scaling / cap));
      scores[part] = scores[part] * scaling + load<Floats>(bias + part * LANES);
    }
    const float most = std::max(most_[i], largest(scores[0] > scores[1] ? scores[0] : scores[1]));
    const float base = most == HIDDEN ? 0.0f : most;
    if (most != most_[i]) {
      const float factor = exponential(Floats{} + (most_[i] - base))[0];
      mass_[i] *= factor;
      float* result = results_ + i * value_size_;
      for (int d = 0; d < value_size_; d += LANES) store(result + d, load<Floats>(result + d) * factor);
      most_[i] = most;
    }
    for (int part = 0; part < 2; ++part) scores[part] = exponential(scores[part] - base);
#ifdef __AVX512BF16__
    if constexpr (BY_PAIRS<Item>) {
      const Words pairs = (Words)_mm512_cvtne2ps_pbh((__m512)scores[1], (__m512)scores[0]);
      store(scores_ + i * KEYS, pairs);
      mass_[i] += (Floats)(pairs << 16) + (Floats)(pairs & 0xFFFF0000u);  // as rounded, so that they are all of it
      return;
    }
#endif
    for (int part = 0; part < 2; ++part) {
      mass_[i] += scores[part];
      store(scores_ + i * KEYS + part * LANES, scores[part]);
    }
  }

  void end(const Group& group, int head, int first) {
    for (int i = 0; i < count_; ++i) {
      const int query_head = head * step_.group + (first + i) % step_.group;
      const int64_t token = group.queries[(first + i) / step_.group].token;
      float divisor = sum(mass_[i]);
      // A sink is a score per head that takes mass and gives none.
      if (step_.scale.sinks) divisor += std::exp(step_.scale.sinks[query_head] - most_[i]);
      Item* to = step_.out + (token * step_.num_heads * step_.group + query_head) * step_.value_size;
      for (int d = 0; d < step_.value_size; ++d) put(to + d, results_[i * value_size_ + d] / divisor);
    }
  }

  const Step<Item>& step_;
  const int key_size_, value_size_, num_operands_;
  std::vector<Operand<Item>> operands_;
  std::vector<float> floats_;
  std::vector<Item> items_;
  Operand<Item> *columns_, *queries_;
  float *scores_, *results_;
  Item *own_keys_, *own_values_;
  int count_ = 0;
  const Item* biases_[ROWS];
  int paths_[ROWS];
  float most_[ROWS];
  Floats mass_[ROWS];
};

// Clear the rows that come into sight, then write the step's keys or values [H, T, size] to the slots.
template <typename Item>
void write_rows(const Tensor& step, const Tensor& slots, const Tensor& spans, const int64_t* tables, int head) {
  const Strides from(step), to(slots);
  const int64_t size = step.size(3), num_tokens = step.size(2), num_spans = spans.size(0), columns = spans.size(1);
  const int64_t* span = static_cast<const int64_t*>(spans.const_data_ptr());
  const bool is_alone = num_spans == 1 && span[8] == 1;
  Item* base = static_cast<Item*>(slots.mutable_data_ptr()) + head * to.head;
  const Item* source = static_cast<const Item*>(step.const_data_ptr()) + head * from.head;
  const int64_t first_row = span[3], slot = span[0];
  for (int64_t i = 0; i < num_spans; ++i, span += columns) {
    if (span[5] != 1) continue;
    for (int64_t row = span[3] + span[2] - span[1]; row < span[4]; ++row)
      std::memset(static_cast<void*>(base + span[0] * to.first + row * to.row), 0, size * sizeof(Item));
  }
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t in_slot = is_alone ? slot : tables[token], row = is_alone ? first_row + token : tables[num_tokens + token];
    std::copy_n(source + token * from.row, size, base + in_slot * to.first + row * to.row);
  }
}

template <typename Item>
void attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
            const Tensor& spans, const Tensor& tables, const Tensor& biases, Scale scale, Tensor& out) {
  const int num_heads = k.size(1);
  const Step<Item> step{static_cast<const Item*>(q.const_data_ptr()), static_cast<const Item*>(biases.const_data_ptr()),
                        static_cast<const Item*>(keys.const_data_ptr()), static_cast<const Item*>(values.const_data_ptr()),
                        static_cast<Item*>(out.mutable_data_ptr()), Strides(q), Strides(keys), Strides(values),
                        num_heads, int(q.size(1) / num_heads), int(q.size(3)), int(v.size(3)), scale};
  const int64_t* table = static_cast<const int64_t*>(tables.const_data_ptr());
  std::vector<Group> groups;
  for (int64_t i = 0; i < spans.size(0); ++i)
    add_groups(static_cast<const int64_t*>(spans.const_data_ptr()) + i * spans.size(1), table, groups);
  struct Piece { const Group* group; int first; };
  std::vector<Piece> pieces;
  for (const Group& group : groups)
    for (int first = 0; first < int(group.queries.size()) * step.group; first += ROWS) pieces.push_back({&group, first});
  // Threads take heads, each with all that is asked of it: what they read of the slots is theirs alone.
  torch::stable::parallel_for(0, num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      write_rows<Item>(k, keys, spans, table, head);
      write_rows<Item>(v, values, spans, table, head);
    }
  });
  const int64_t num_pieces = pieces.size();
  torch::stable::parallel_for(0, num_heads * num_pieces, 1, [&](int64_t begin, int64_t end) {
    Rows<Item> rows(step);
    for (int64_t i = begin; i < end; ++i) rows.attend(*pieces[i % num_pieces].group, i / num_pieces, pieces[i % num_pieces].first);
  });
}

Tensor attend_spans(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor spans, Tensor tables, Tensor biases,
                    double scaling, double softcap, std::optional<Tensor> sinks) {
  STD_TORCH_CHECK(q.size(1) % k.size(1) == 0 && q.size(3) == k.size(3), "queries of another shape");
  STD_TORCH_CHECK(keys.size(3) == k.size(3) && values.size(3) == v.size(3), "slots of another shape");
  for (const Tensor& each : {q, k, v, keys, values}) STD_TORCH_CHECK(each.stride(3) == 1, "rows that are not whole");
  for (const Tensor& each : {k, v, keys, values, biases})
    STD_TORCH_CHECK(each.scalar_type() == q.scalar_type(), "tensors of several formats");
  STD_TORCH_CHECK(!sinks || sinks->scalar_type() == ScalarType::Float, "sinks in another format");
  Tensor out = empty(q, {1, q.size(2), q.size(1), v.size(3)});
  if (spans.size(0) == 0) return out;
  const Scale scale{float(scaling), float(softcap), sinks ? static_cast<const float*>(sinks->const_data_ptr()) : nullptr};
  by_type(q, [&](auto* none) {
    attend<std::remove_pointer_t<decltype(none)>>(q, k, v, keys, values, spans, tables, biases, scale, out);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specsplit, CPU, library) { library.impl("attend_spans", TORCH_BOX(&attend_spans)); }
