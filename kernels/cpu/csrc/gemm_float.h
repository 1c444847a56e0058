// Linear layers of fp32 activations with weights of any format.
//
// kF32, kBF16, kF8: a panel is [inputs][panel] values.  (placeholder layout)

static int64_t float_panel_bytes(const Source& s) {
  return s.inputs * kPanel * (s.format == kF32 ? 4 : s.format == kBF16 ? 2 : 1) + 0;
}

static void pack_float_panel(const Source& s, int64_t panel, uint8_t* out) { (void)s; (void)panel; (void)out; __builtin_trap(); }

static void linear_float(const LinearArgs& a, const Team& team) { (void)a; (void)team; __builtin_trap(); }
