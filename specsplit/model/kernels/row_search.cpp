// The best tokens of rows of logits, by logit / temperature + noise, within top-k, top-p and min-p: exactly what
// sampling/best.py finds for a CPU, in one go. Right behind a forward, whose weights have swept the caches, each
// operator of a language above takes longer than all of this.
//
// Noise has a lower and an upper bound, and the leading ones of a token's hash bound it more closely. So most tokens
// are left out by their logit or a comparison of integers, and the others are computed as there, in double.

// Sums are rounded as those that they are compared with.
#pragma GCC optimize("fp-contract=off")

#include "tensors.h"

#include <limits>
#include <numeric>
#include <optional>

namespace {

using namespace specsplit;

constexpr int64_t BLOCK = 256;   // logits whose largest bounds the others
constexpr int64_t AT_ONCE = 64;  // blocks that one thread looks at by itself
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;
constexpr double QUANTUM = 1.0 / (1 << 16);
constexpr double LEAST = -3.2, MOST = 22.9;  // noise lies between them
constexpr double OF_ONE = 0.693148, SLACK = 1e-4;  // what each leading one of a hash adds to the noise at most
constexpr float COLDEST = 1e-30f;
constexpr double ROUNDING = 3e-6;  // far above what sums of weights are off
constexpr float FARTHEST = -30;    // weights of less are not seen in a sum
constexpr double LIKELY = 1e-4;    // probability of the tokens that are looked at first
constexpr size_t MANY = 1 << 15;   // more tokens than that within the cuts are left to others
constexpr float NONE = std::numeric_limits<float>::infinity();

struct Token {
  float logit;
  int64_t place;
};

// Tokens that cuts leave, the largest logit first; whether those behind the first `num_certain` belong to them hangs on a
// rounding.
struct Kept {
  std::vector<Token> tokens;
  size_t num_certain;
};

struct Found {
  double sum;
  int64_t place;
  // Of equal sums the one that lies first is better.
  bool operator<(const Found& other) const { return sum != other.sum ? sum > other.sum : place < other.place; }
};

// The best that were found, the best first.
struct Best {
  const size_t count;
  double floor;  // the least sum of one of the best, as far as it is known
  std::vector<Found> found = {};

  // Return more than rounding does to a sum near the floor, and to a bound of its noise.
  double slack() const { return SLACK + (std::isfinite(floor) ? 1e-15 * std::fabs(floor) : 0.0); }

  void add(const Found& one) {
    found.insert(std::lower_bound(found.begin(), found.end(), one), one);
    if (found.size() > count) found.pop_back();
    if (found.size() == count) floor = std::max(floor, found.back().sum);
  }
};

struct Cuts {
  int64_t top_k;
  double top_p, min_p;
};

// Return hashes but for their last step, which leaves the highest 31 bits.
template <typename Integers>
inline Integers mixed(Integers state) {
  state = (state ^ (state >> 30)) * MIX_1;
  return (state ^ (state >> 27)) * MIX_2;
}

// Return a bit for each word that is at least so large.
inline unsigned at_least(Longs words, uint64_t least) {
#ifdef __AVX512F__
  return _mm512_cmpge_epu64_mask((__m512i)words, _mm512_set1_epi64(int64_t(least)));
#else
  unsigned found = 0;
  for (int lane = 0; lane < WORDS; ++lane) found |= unsigned(words[lane] >= least) << lane;
  return found;
#endif
}

inline double noise_of(uint64_t hash) {
  const double uniform = (double(hash >> 32) + 0.5) * 0x1p-32;
  return std::nearbyint(-std::log(-std::log(uniform)) / QUANTUM) * QUANTUM;
}

class Row {
 public:
  Row(const float* logits, int64_t size, const int64_t* tokens, uint64_t key, double temperature)
      : logits_(logits), size_(size), tokens_(tokens), key_(key), temperature_(temperature),
        scale_(float(std::max(temperature, double(COLDEST)))), maxima_((size + BLOCK - 1) / BLOCK) {
    for_blocks([&](size_t block) { maxima_[block] = largest_of(block); });
    top_ = *std::max_element(maxima_.begin(), maxima_.end());
  }

  // Return the `count` best, fewer if there are no more; nothing if others have to say.
  std::optional<std::vector<Found>> best(int64_t count, const Cuts& cuts) {
    Best best{size_t(count), -NONE};
    if (!std::isfinite(top_)) return best.found;
    if ((cuts.top_k > 0 && cuts.top_k < size_) || cuts.top_p < 1 || cuts.min_p > 0) {
      const auto kept = kept_by(cuts);
      if (!kept) return std::nullopt;
      for (const Token& token : kept->tokens) consider(token.place, token.logit, best);
      for (size_t i = kept->num_certain; i < kept->tokens.size(); ++i)
        for (const Found& found : best.found)
          if (found.place == kept->tokens[i].place) return std::nullopt;
    } else {
      search(best);
    }
    return best.found;
  }

 private:
  int64_t end_of(size_t block) const { return std::min<int64_t>(size_, (block + 1) * BLOCK); }

  // Call `function(block)` for all blocks, by several threads.
  template <typename Function>
  void for_blocks(const Function& function) const {
    torch::stable::parallel_for(0, maxima_.size(), AT_ONCE, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) function(block);
    });
  }

  // Return the largest logit of a block, infinity if one is no number.
  float largest_of(size_t block) const {
    Floats largest = Floats{} - NONE;
    Ints strange = {};
    int64_t i = block * BLOCK;
    const int64_t end = end_of(block);
    for (; i + LANES <= end; i += LANES) {
      const Floats some = floats(logits_ + i);
      strange |= some != some;
      largest = some > largest ? some : largest;
    }
    float most = -NONE;
    bool is_strange = false;
    for (; i < end; ++i) most = std::max(most, logits_[i]), is_strange |= logits_[i] != logits_[i];
    for (int lane = 0; lane < LANES; ++lane) most = std::max(most, largest[lane]), is_strange |= strange[lane] != 0;
    return is_strange ? NONE : most;
  }

  double nats(float logit) const { return (double(logit) - double(top_)) / temperature_; }

  // Take a token in if it is among the best.
  void consider(int64_t place, float logit, Best& best) const {
    const double own = nats(logit);
    if (!(own + MOST + best.slack() >= best.floor) || !std::isfinite(own)) return;
    uint64_t hash = mixed(key_ + (uint64_t(tokens_ ? tokens_[place] : place) + 1) * GAMMA);
    hash ^= hash >> 31;
    const uint32_t zeros = ~uint32_t(hash >> 32);
    if (own + ((zeros ? __builtin_clz(zeros) : 32) + 1) * OF_ONE + best.slack() < best.floor) return;
    best.add({own + noise_of(hash), place});
  }

  // Consider all tokens that may be among the best.
  void search(Best& best) const {
    if (maxima_.size() >= best.count)  // the largest of each block are different tokens
      best.floor = nats(nth_of_maxima(best.count)) + LEAST - SLACK;
    const size_t first = std::max_element(maxima_.begin(), maxima_.end()) - maxima_.begin();
    search_block(first, best);
    // Each part has a list of its own, which begins with what is known.
    const int64_t num_parts = (maxima_.size() + AT_ONCE - 1) / AT_ONCE;
    std::vector<Best> of_parts(num_parts, best);
    torch::stable::parallel_for(0, num_parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part)
        for (size_t block = part * AT_ONCE; block < std::min<size_t>(maxima_.size(), (part + 1) * AT_ONCE); ++block)
          if (block != first) search_block(block, of_parts[part]);
    });
    const size_t own_first = first * BLOCK, own_last = end_of(first);
    for (const Best& part : of_parts)
      for (const Found& found : part.found)
        if (size_t(found.place) < own_first || size_t(found.place) >= own_last) best.add(found);
  }

  float nth_of_maxima(size_t count) const {
    std::vector<float> ranked(maxima_);
    std::nth_element(ranked.begin(), ranked.begin() + count - 1, ranked.end(), std::greater<float>());
    return ranked[count - 1];
  }

  void search_block(size_t block, Best& best) const {
    const double missing = best.floor - nats(maxima_[block]);
    if (missing - best.slack() > MOST || maxima_[block] == -NONE) return;
    const int num_ones = int(std::min(31.0, std::max(0.0, std::ceil((missing - best.slack()) / OF_ONE) - 1)));
    const uint64_t least = num_ones > 0 ? ~uint64_t(0) << (64 - num_ones) : 0;  // of a hash of one of the best
    int64_t i = block * BLOCK;
    for (; i + WORDS <= end_of(block); i += WORDS) {
      const Longs tokens = tokens_ ? load<Longs>(tokens_ + i) : Longs{0, 1, 2, 3, 4, 5, 6, 7} + uint64_t(i);
      for (unsigned found = at_least(mixed(key_ + (tokens + 1) * GAMMA), least); found; found &= found - 1) {
        const int64_t place = i + __builtin_ctz(found);
        consider(place, logits_[place], best);
      }
    }
    for (; i < end_of(block); ++i) consider(i, logits_[i], best);
  }

  float weight_nats(float logit) const { return (logit - top_) / scale_; }

  // Return the sum of all weights.
  double total() const {
    std::vector<double> of_blocks(maxima_.size());
    for_blocks([&](size_t block) {
      if (weight_nats(maxima_[block]) < FARTHEST) return;
      Floats sums = {};
      for (int64_t i = block * BLOCK; i < end_of(block); i += LANES) {
        Floats some = Floats{} - NONE;
        std::memcpy(&some, logits_ + i, std::min<int64_t>(LANES, end_of(block) - i) * sizeof(float));
        sums += exponential((some - top_) / scale_);
      }
      of_blocks[block] = sum(sums);
    });
    return std::accumulate(of_blocks.begin(), of_blocks.end(), 0.0);
  }

  // Return the tokens whose logit is at least so large, the largest first, of equal ones the first; nothing if many.
  std::optional<std::vector<Token>> from(float least) const {
    std::vector<Token> tokens;
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (maxima_[block] < least) continue;
      for (int64_t i = block * BLOCK; i < end_of(block); ++i)
        if (logits_[i] >= least) tokens.push_back({logits_[i], i});
      if (tokens.size() > MANY) return std::nullopt;
    }
    std::sort(tokens.begin(), tokens.end(), [](const Token& one, const Token& other) {
      return one.logit != other.logit ? one.logit > other.logit : one.place < other.place;
    });
    return tokens;
  }

  // Return the first of some tokens that have a share of a mass, or of their own; nothing if that takes more of them.
  std::optional<Kept> first_of(std::vector<Token> tokens, double share, double mass) const {
    std::vector<double> sums;
    double own = 0;
    for (const Token& token : tokens) {
      const Floats weight = exponential(Floats{} + weight_nats(token.logit));
      sums.push_back(own += weight[0]);
    }
    const double wanted = share * (mass > 0 ? mass : own);
    const auto first = std::lower_bound(sums.begin(), sums.end(), wanted * (1 - ROUNDING));
    const auto last = std::lower_bound(sums.begin(), sums.end(), wanted * (1 + ROUNDING));
    if (last == sums.end()) return std::nullopt;
    tokens.resize(last - sums.begin() + 1);
    return Kept{std::move(tokens), size_t(first - sums.begin() + 1)};
  }

  // Return what the cuts leave, nothing if that takes more than this.
  std::optional<Kept> kept_by(const Cuts& cuts) const {
    std::optional<Kept> kept;
    const float likely = cuts.min_p > 0 ? top_ + float(temperature_ * std::log(cuts.min_p)) : -NONE;
    if (cuts.top_k > 0 && cuts.top_k < size_) {
      kept = all_of(largest(cuts.top_k));
      if (kept && cuts.top_p < 1) kept = first_of(std::move(kept->tokens), cuts.top_p, 0);
    } else if (cuts.top_p < 1) {
      kept = nucleus(cuts.top_p);
    } else {
      kept = all_of(from(likely));
    }
    while (kept && !kept->tokens.empty() && kept->tokens.back().logit < likely) kept->tokens.pop_back();
    return kept;
  }

  static std::optional<Kept> all_of(std::optional<std::vector<Token>> tokens) {
    if (!tokens) return std::nullopt;
    const size_t size = tokens->size();
    return Kept{std::move(*tokens), size};
  }

  // Return the `count` tokens with the largest logits, and those that equal the last of them.
  std::optional<std::vector<Token>> largest(int64_t count) const {
    if (count > int64_t(maxima_.size())) return std::nullopt;
    auto tokens = from(nth_of_maxima(count));
    if (!tokens || tokens->back().logit == -NONE) return std::nullopt;
    const float last = (*tokens)[count - 1].logit;
    while (tokens->back().logit < last) tokens->pop_back();
    return tokens;
  }

  // Return the likeliest tokens, as few as have a share of all probability.
  std::optional<Kept> nucleus(double share) const {
    const double mass = total();
    for (const double least : {LIKELY * mass, 0.5 * (1 - share) * mass / double(size_)}) {
      const float lowest = top_ + scale_ * float(std::log(least));
      auto tokens = from(lowest);
      if (!tokens) return std::nullopt;
      auto kept = first_of(std::move(*tokens), share, mass);
      // What was left out may equal the last one but for a rounding.
      if (kept && kept->tokens.back().logit > lowest + float(ROUNDING) * (std::fabs(top_) + std::fabs(lowest))) return kept;
    }
    return std::nullopt;
  }

  const float* logits_;
  const int64_t size_;
  const int64_t* tokens_;
  const uint64_t key_;
  const double temperature_;
  const float scale_;
  std::vector<float> maxima_;
  float top_;
};

// Return for each row [R, V] how many are found, or -1 if others have to say, their places and their sums,
// [R, 1 + 2 * count]. `tokens` are those of the places, or none; keys [R] are the states before a position's first token.
Tensor best_of_rows(Tensor rows, std::optional<Tensor> tokens, std::vector<int64_t> keys, int64_t count, double temperature,
                    int64_t top_k, double top_p, double min_p) {
  const int64_t num_rows = rows.size(0), size = rows.size(1), width = 1 + 2 * count;
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Float && rows.is_contiguous() && size > 0, "other rows");
  STD_TORCH_CHECK(int64_t(keys.size()) == num_rows && count > 0, "other keys");
  STD_TORCH_CHECK(!tokens || (tokens->numel() == size && tokens->is_contiguous() && tokens->scalar_type() == ScalarType::Long), "other tokens");
  Tensor out = empty(rows, {num_rows, width}, ScalarType::Double);
  const float* logits = static_cast<const float*>(rows.const_data_ptr());
  const int64_t* of_places = tokens ? static_cast<const int64_t*>(tokens->const_data_ptr()) : nullptr;
  double* to = static_cast<double*>(out.mutable_data_ptr());
  for_rows(num_rows, size, [&](int64_t row) {
    Row one(logits + row * size, size, of_places, uint64_t(keys[row]), temperature);
    const auto best = one.best(count, {top_k, top_p, min_p});
    double* own = to + row * width;
    own[0] = best ? double(best->size()) : -1;
    for (size_t i = 0; best && i < best->size(); ++i) own[1 + i] = double((*best)[i].place), own[1 + count + i] = (*best)[i].sum;
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specsplit, CPU, library) { library.impl("best_of_rows", TORCH_BOX(&best_of_rows)); }
