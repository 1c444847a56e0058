// How packed integers are cut along their inputs: chunks of parts, see gemm_int.h.

// Parts of equal length, but for the last.
struct Chunk {
  int64_t group, parts;             // first group; a group a part, or a piece of `group`
  int64_t lane, lanes, last_lanes;  // first lane within the group; lanes of a part, of the last
  bool first, last;                 // parts begin their groups, end them
};

// How a weight is cut.
template <int F>
struct Cut {
  static constexpr int64_t lane = F == kI4 ? 8 : 4;         // inputs
  static constexpr int64_t lane_bytes = lane * kXBytes<F>;  // of prepared inputs
  const Packed& w;
  int64_t groups, group_lanes, max_lanes;
  int64_t per, pieces, chunks;  // groups of a chunk, or chunks of a group; one of them is 1

  Cut(const Packed& weight, int64_t lanes) : w(weight), max_lanes(lanes) {
    groups = groups_of(w.inputs, w.group);
    group_lanes = ceil_div(w.group, lane);
    per = group_lanes <= max_lanes ? max_lanes / group_lanes : 1;
    if (per > groups) per = groups;
    pieces = ceil_div(group_lanes, max_lanes);
    chunks = pieces == 1 ? ceil_div(groups, per)
                         : (groups - 1) * pieces + ceil_div(lanes_of(groups - 1), max_lanes);
  }
  int64_t lanes_of(int64_t group) const {
    return group == groups - 1 ? ceil_div(w.inputs - group * w.group, lane) : group_lanes;
  }
  Chunk at(int64_t index) const {
    Chunk c = {index / pieces * per, 1, index % pieces * max_lanes, 0, 0, true, true};
    if (pieces == 1) {
      c.parts = groups - c.group < per ? groups - c.group : per;
      c.lanes = group_lanes;
      c.last_lanes = lanes_of(c.group + c.parts - 1);
    } else {
      const int64_t left = lanes_of(c.group) - c.lane;
      c.lanes = c.last_lanes = left < max_lanes ? left : max_lanes;
      c.first = c.lane == 0;
      c.last = left <= max_lanes;
    }
    return c;
  }
  int64_t part_lanes(const Chunk& c, int64_t part) const {
    return part == c.parts - 1 ? c.last_lanes : c.lanes;
  }
  int64_t chunk_bytes(const Chunk& c) const {  // of a row of prepared inputs
    return ((c.parts - 1) * c.lanes + c.last_lanes) * lane_bytes;
  }
  const uint8_t* panel(int64_t index) const {  // the lanes of its first group
    return (const uint8_t*)&w + w.data_offset + index * w.panel_bytes + lead_of(w.zero_type, kPanel);
  }
};
