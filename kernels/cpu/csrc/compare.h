// Two models' logits for the same tokens, compared row by row in fp64; see kernels/logits.py.

typedef float vh __attribute__((vector_size(W * 2)));
typedef double vd __attribute__((vector_size(W * 4)));
typedef int64_t vl __attribute__((vector_size(W * 4)));
constexpr int D = W / 2;  // numbers of a vector of fp64
constexpr int kBest = 5;
constexpr float kNone = -1e30f;  // a logit that adds nothing

// e^x of x <= 0, as exp() of fp32, by the Taylor polynomial of degree 12: relative error below
// 3e-16. Adding 1.5 2^52 rounds, and leaves the integer in the lowest bits. Below -700 it is e^-700.
static inline vd exp64(vd x) {
  const vd least = vd{} - 700.0;
  x = x < least ? least : x;  // NaN stays
  const vd shifted = x * 1.4426950408889634 + 0x1.8p52, n = shifted - 0x1.8p52;
  const vd r = x - n * 0x1.62e42feep-1 - n * 0x1.a39ef35793c76p-33;  // ln 2 in two parts
  vd p = vd{} + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return (vd)((vl)p + ((vl)shifted << 52));
}

// The largest values of a row, descending, and where they are; of equal ones the first comes first.
struct Best {
  float values[kBest];
  int64_t places[kBest] = {};
  int count;  // of them, fewer in a short row

  Best(const float* x, int64_t n) : count(n < kBest ? (int)n : kBest) {
    for (float& value : values) value = -__builtin_inff();
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
      const vf low = max(load(x + i), load(x + i + W));
      const vf high = max(load(x + i + 2 * W), load(x + i + 3 * W));
      if (reduce_max(max(low, high)) > values[kBest - 1]) take(x, i, i + 4 * W);
    }
    take(x, i, n);
  }
  void take(const float* x, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      if (!(x[i] > values[kBest - 1])) continue;
      int at = kBest - 1;
      for (; at > 0 && x[i] > values[at - 1]; at--) {
        values[at] = values[at - 1];
        places[at] = places[at - 1];
      }
      values[at] = x[i];
      places[at] = i;
    }
  }
  bool has(int64_t place) const {
    for (int i = 0; i < count; i++)
      if (places[i] == place) return true;
    return false;
  }
};

static inline vd wide_part(const float* x, int64_t n) {
  vh a = vh{} + kNone;
  if (n < D) {
    __builtin_memcpy(&a, x, n * sizeof(float));
  } else {
    __builtin_memcpy(&a, x, sizeof a);
  }
  return __builtin_convertvector(a, vd);
}

static inline double sum_of(vd a, vd b) {
  double sum = 0;
  for (int i = 0; i < D; i++) sum += a[i] + b[i];
  return sum;
}

// The sums are kept in two vectors each, in their order.
static void compare_row(const float* p, const float* q, int64_t n, int64_t target, double* out,
                        int64_t stride) {
  const Best first(p, n), second(q, n);
  const vd top_p = vd{} + first.values[0], top_q = vd{} + second.values[0];
  vd of_p[2] = {}, of_q[2] = {}, apart[2] = {};
  for (int64_t i = 0; i < n; i += W)
    for (int j = 0; j < 2 && i + j * D < n; j++) {
      const int64_t k = i + j * D;
      const vd x = wide_part(p + k, n - k), y = wide_part(q + k, n - k);
      const vd e = exp64(x - top_p);
      of_p[j] += e;
      of_q[j] += exp64(y - top_q);
      apart[j] += e * (x - y);
    }
  const double sum = sum_of(of_p[0], of_p[1]);
  const double z_p = __builtin_log(sum) + first.values[0];
  const double z_q = __builtin_log(sum_of(of_q[0], of_q[1])) + second.values[0];
  const double kl = sum_of(apart[0], apart[1]) / sum - z_p + z_q;
  int common = 0;
  for (int i = 0; i < first.count; i++) common += second.has(first.places[i]);
  out[0] = z_p - p[target];
  out[stride] = z_q - q[target];
  out[2 * stride] = kl < 0 && !__builtin_isinf(kl) ? 0 : kl;  // rounding may leave -1e-17
  out[3 * stride] = first.places[0] == second.places[0];
  out[4 * stride] = (double)common / first.count;
}

static void compare(const float* p, const float* q, const int64_t* targets, double* out,
                    int64_t rows, int64_t columns, const Team& team) {
  const Range own = share(rows, team);
  for (int64_t i = own.begin; i < own.end; i++)
    compare_row(p + i * columns, q + i * columns, columns, targets[i], out + i, rows);
}
