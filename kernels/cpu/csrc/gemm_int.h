// Linear layers of integer activations: exact int32 sums within a group, fp32 between groups.

static void linear_int(const LinearArgs& a, const Team& team) {
  const Packed& w = *a.weight;
  const uint8_t* data = (const uint8_t*)a.weight + w.data_offset;
  const float* bias = w.has_bias ? (const float*)((const uint8_t*)a.weight + w.bias_offset) : nullptr;
  const int64_t step = lane_inputs(w.format);
  const Range outputs = share(w.outputs, team);
  for (int64_t n = outputs.begin; n < outputs.end; n++) {
    const int64_t lane = n % w.panel;
    for (int64_t row = 0; row < a.rows; row++) {
      const int8_t* x = (const int8_t*)a.x + row * a.x_stride;
      const float x_scale = a.x_scale[a.x_scale_per_row ? row : 0];
      float total = 0;
      for (int64_t k0 = 0, g = 0; k0 < w.inputs; k0 += w.group, g++) {
        const uint8_t* group = data + n / w.panel * w.panel_bytes + g * w.group_bytes;
        const int64_t count = w.inputs - k0 < w.group ? w.inputs - k0 : w.group;
        const int64_t quads = ceil_div(count, step);
        int32_t sum = 0, zero = 0;
        const uint8_t* scales = group + quads * w.panel * 4;
        if (w.has_zero) zero = ((const int8_t*)scales + w.panel * (w.scale_type == kScaleF32 ? 4 : 2))[lane];
        for (int64_t i = 0; i < count; i++) {
          uint8_t byte = group[(i / step * w.panel + lane) * 4 + i % 4];
          int q = w.format == kI8 ? (int8_t)byte : (int)(i % 8 < 4 ? byte & 15 : byte >> 4) - 8;
          sum += (q - zero) * x[k0 + i];
        }
        float scale = w.scale_type == kScaleF32 ? ((const float*)scales)[lane]
                                                : bf16_to_f32(((const uint16_t*)scales)[lane]);
        if (w.group >= w.inputs) {
          total = (float)sum * (x_scale * scale);
        } else {
          total = total + (float)sum * scale;
        }
      }
      if (w.group < w.inputs) total = total * x_scale;
      if (bias != nullptr) total = total + bias[n];
      float* y = a.y + row * a.y_stride + n;
      *y = a.accumulate ? *y + total : total;
    }
  }
}
