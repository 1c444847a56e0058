// What the kernel takes: `_Arguments` of fused_block.py, and `CacheArguments` of attention.py.

struct Cache {  // and what the attention in front reads beside it
  const u16* read;              // bf16 [ROWS, (QUERIES + 2) * KV_HEADS * DIM]: q, k and v
  const u16* norm[2];           // bf16 [DIM] of heads of q and of k, or null
  const float* turn[2];         // fp32 [positions, DIM]: cosines and sines, both halves alike
  const long long* positions;   // [ROWS]
  const long long* slots;       // [ROWS], where the new token goes; negative: nowhere
  const int* tables;            // [ROWS, width]
  const int* lengths;           // [ROWS], the new token included
  char* pages[2];               // K [pages, KV_HEADS, 64, DIM], V [pages, KV_HEADS, DIM, 64]
  const float* scale[2];        // fp32 [KV_HEADS], or null
  const float* offset;          // fp32 [KV_HEADS, DIM], which K is stored without, or null
  float softmax_scale;
  int width;
};

struct __align__(64) Map {  // how TMA reads a weight: `tensor_map` of nvrtc.py
  char bytes[128];
};

struct Block {
  const void* weight[PRODUCTS];
  const u32* scale[PRODUCTS];     // fp32: 4 bits [inputs / 128, outputs], 8 bits [outputs]
  const void* bias[PRODUCTS];     // [outputs] in fp32, of 16 bits in bf16, or null
  const float* static_scale[PRODUCTS];  // of 8-bit inputs; null: by token
  const int* sinks[PRODUCTS];     // [ROWS], 1 where the second of two scales is a row's, or null
  const void* x;                  // [ROWS, ATTENTION] what attention gives: bf16, or int8
  const float* x_scale;           // of 8-bit x: fp32 [1], or [ROWS] where `x_scaled` is 1
  const u16* residual;            // bf16 [ROWS, HIDDEN]
  const u16* norm[2];             // bf16 [HIDDEN]: before gate and up, and before q, k and v
  u16* total;                     // bf16 [ROWS, HIDDEN]: the residual after the block
  u16* qkv;                       // bf16 [ROWS, QKV], or null
  void* exchanged;                // two sets of what programs hand on
  u32* launches;                  // how many there were
  const u16* router;              // bf16 [EXPERTS, HIDDEN], or null
  float eps;
  float factor;                   // of the chosen experts' weights
  int normalized;                 // whether these are divided by their sum
  int x_scaled;
  Cache cache;
#if BITS == 16
  Map map[PRODUCTS];
#endif
};
