// Attention over the paged cache, and the writing of it.

static void write_kv(const WriteKvArgs&, const Team&) { __builtin_trap(); }
static void attention(const AttentionArgs&, const Team&) { __builtin_trap(); }
