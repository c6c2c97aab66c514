-- report - what the ranks tell each other of a step: sums, counts, norms, added losses.
--
-- Every rank sends its part as a string; the parts are added in the order in which one process
-- would have met them, so that all ranks have the same numbers, under every layout.
local report = {}

-- -1: not known.
local SUMS <const>, ADDED <const>, NORM <const> = "<i1dddddzi4i4", "<s4i4i4i4d", "<i4d"

--- The string of a part: {has_loss, loss, count, slots, expected, peak, stop, norms, added}; peak:
--- the bytes of its tensors at their highest.
function report.pack(mine)
  local parts = { SUMS:pack(mine.has_loss and 1 or 0, mine.loss, mine.count, mine.slots or -1,
    mine.expected or -1, mine.peak, mine.stop or "", #mine.norms, #mine.added) }
  for _, norm in ipairs(mine.norms) do table.insert(parts, NORM:pack(norm[1], norm[2])) end
  for _, a in ipairs(mine.added) do
    table.insert(parts, ADDED:pack(a.name, a.mb, a.unit, a.k, a.value))
  end
  return table.concat(parts)
end

--- A number that was an integer before it was packed.
function report.whole(x) return math.tointeger(x) or x end
local whole <const> = report.whole

function report.unpack(text)
  local has_loss, loss, count, slots, expected, peak, stop, n_norms, n_added, at =
    SUMS:unpack(text)
  local sums = {
    has_loss = has_loss == 1, loss = loss, count = whole(count), added = {}, norms = {},
    peak = whole(peak), stop = stop, slots = slots >= 0 and whole(slots) or nil,
    expected = expected >= 0 and whole(expected) or nil,
  }
  for i = 1, n_norms do
    local order, norm
    order, norm, at = NORM:unpack(text, at)
    sums.norms[i] = { order, norm }
  end
  for i = 1, n_added do
    local a = {}
    a.name, a.mb, a.unit, a.k, a.value, at = ADDED:unpack(text, at)
    sums.added[i] = a
  end
  return sums
end

-- Added losses by name, each summed in the order in which one process meets them.
local function sum_added(list)
  table.sort(list, function(a, b)
    for _, key in ipairs { "replica", "mb", "unit", "k" } do
      if a[key] ~= b[key] then return a[key] < b[key] end
    end
    return false
  end)
  local by_name = {}
  for _, added in ipairs(list) do by_name[added.name] = (by_name[added.name] or 0) + added.value end
  return by_name
end

--- The sums of all ranks' parts. replica_of(r) is the replica that part r, from 1, comes from.
function report.combine(parts, n_samples, replica_of)
  local sums = { loss = 0.0, count = 0, samples = n_samples, norms = {}, added = {},
    peak = { bytes = -1, rank = 0 } }
  for r, part in ipairs(parts) do
    if part.has_loss then
      sums.loss, sums.count = sums.loss + part.loss, sums.count + part.count
      sums.slots = sums.slots or part.slots
    end
    if part.peak > sums.peak.bytes then sums.peak = { bytes = part.peak, rank = r - 1 } end
    sums.expected = sums.expected or part.expected
    if part.stop ~= "" then sums.stop = sums.stop or part.stop end
    table.move(part.norms, 1, #part.norms, #sums.norms + 1, sums.norms)
    for _, a in ipairs(part.added) do
      a.replica = replica_of(r)
      table.insert(sums.added, a)
    end
  end
  table.sort(sums.norms, function(a, b) return a[1] < b[1] end)
  sums.added = sum_added(sums.added)
  return sums
end

--- Bytes that a part with this many norms has at most, with room for some added losses.
function report.size(n_norms) return 4096 + NORM:packsize() * n_norms end

return report
