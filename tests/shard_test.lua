-- shard_test - the parts of parameters and activations that ranks of a tensor-parallel group hold:
-- each is compared with what the whole says about the same places.
local check <const> = require "tests.check"
local rille <const> = require "rille"
local core <const> = rille.core

local ROWS <const>, COLUMNS <const> = 12, 10

-- By dimension: what three ranks hold of it. The third one's last run is shorter than its place; of
-- the shared run the second one does not count.
local GROUPS <const> = {
  [0] = {
    {dim = 0, full = ROWS, size = 5, runs = {{0, 2, true}, {6, 1, true}, {9, 2, true}}},
    {dim = 0, full = ROWS, size = 5, runs = {{2, 2, true}, {7, 1, true}, {9, 2, false}}},
    {dim = 0, full = ROWS, size = 6, runs = {{4, 2, true}, {8, 1, true}, {11, 1, true}}},
  },
  [1] = {
    {dim = 1, full = COLUMNS, size = 5, runs = {{0, 2, true}, {4, 1, true}, {7, 2, true}}},
    {dim = 1, full = COLUMNS, size = 5, runs = {{2, 2, true}, {5, 1, true}, {7, 2, false}}},
    {dim = 1, full = COLUMNS, size = 3, runs = {{6, 1, true}, {9, 1, true}, {10, 0, true}}},
  },
}
local STARTS <const> = {
  normal = function(p) p:normal_(0.5, 2) end,
  uniform = function(p) p:uniform_(-1, 3) end,
  constant = function(p) p:fill_(1.5) end,
  data = function(p) -- the same for every p, not contiguous, and of another dtype
    p:copy_(rille.arange(ROWS * COLUMNS):reshape(COLUMNS, ROWS):t():to("f64") / 7)
  end,
}

local function declare(dtype, start)
  local p = core.param("h.0.w", {ROWS, COLUMNS}, {dtype = dtype})
  STARTS[start](p)
  return p
end

--- The places of the whole, from 1, that a part's dimension consists of; false: padding.
local function places(shard)
  local list = {}
  for _, run in ipairs(shard.runs) do
    for k = 1, run[2] do list[#list + 1] = run[1] + k end
  end
  while #list < shard.size do list[#list + 1] = false end
  return list
end

--- What a part holds of nested rows.
local function cut(rows, shard)
  local out, list = {}, places(shard)
  if shard.dim == 0 then
    for i, at in ipairs(list) do
      out[i] = {}
      for c = 1, COLUMNS do out[i][c] = at and rows[at][c] or 0.0 end
    end
  else
    for r = 1, ROWS do
      out[r] = {}
      for i, at in ipairs(list) do out[r][i] = at and rows[r][at] or 0.0 end
    end
  end
  return out
end

check.test("a part's values are those of the whole at its places, padding is 0", function()
  for _, dtype in ipairs{"f32", "f64", "bf16"} do
    for start in pairs(STARTS) do
      local whole = declare(dtype, start):tolist()
      for dim = 0, 1 do
        for _, shard in ipairs(GROUPS[dim]) do
          local before, placed = declare(dtype, start), declare(dtype, start)
          core.shard(before, shard)
          check.equal(core.is_placed(before), false)
          check.equal(before:tolist(), cut(whole, shard))
          placed:tolist()
          core.shard(placed, shard) -- the values move along
          check.equal({core.is_placed(placed), placed:tolist()}, {true, cut(whole, shard)})
          if start == "normal" or start == "uniform" then -- drawn again where it lies
            rille.no_grad(STARTS[start], placed)
            check.equal(placed:tolist(), cut(whole, shard))
          end
          local late = core.param("h.0.w", {ROWS, COLUMNS}, {dtype = dtype})
          core.shard(late, shard)
          late:copy_(rille.tensor(cut(whole, shard), {dtype = dtype})) -- of the part's own shape
          check.equal(late:tolist(), cut(whole, shard))
        end
      end
    end
  end
end)

check.test("values written before a parameter is cut are kept, and its neighbours too", function()
  local a, b = declare("f32", "normal"), core.param("b", {7}):normal_()
  local _ <const> = core.weightset({a, b}, 0, 0, 2)
  rille.no_grad(function() a:mul_(3) end)
  local whole, other = a:tolist(), b:tolist()
  core.shard(a, GROUPS[1][2])
  check.equal({a:tolist(), b:tolist()}, {cut(whole, GROUPS[1][2]), other})
  check.equal(core.weightset{a, b}:numel(), 80)
  check.equal({a:tolist(), b:tolist()}, {cut(whole, GROUPS[1][2]), other})
end)

check.test("shard: what it is told, it tells; whole again it begins anew", function()
  local p, shard = declare("f64", "normal"), GROUPS[0][2]
  local whole = p:tolist()
  check.equal({core.shard_of(p), core.full_shape(p)}, {nil, {ROWS, COLUMNS}})
  core.shard(p, {dim = 0, full = ROWS, size = 4, runs = {{8, 3}}})
  check.equal(core.shard_of(p), {dim = 0, full = ROWS, size = 4, runs = {{8, 3, true}}})
  check.equal({{p:shape()}, p:numel()}, {{4, COLUMNS}, 4 * COLUMNS})
  check.raises(function() core.shard(p, shard) end, "h.0.w is cut already and has values")
  core.unplace(p)
  check.equal({p:shape()}, {4, COLUMNS})
  core.shard(p, shard)
  check.equal({core.shard_of(p), core.full_shape(p)}, {shard, {ROWS, COLUMNS}})
  check.equal(p:tolist(), cut(whole, shard))
  core.shard(p)
  check.equal({core.shard_of(p), core.is_placed(p), {p:shape()}}, {nil, false, {ROWS, COLUMNS}})
  check.equal(p:tolist(), whole)
end)

check.test("shard: a part that does not fit is refused, and nothing changes", function()
  local function refused(part, words)
    local p = declare("f32", "normal")
    check.raises(function() core.shard(p, part) end, words)
    check.equal({core.shard_of(p), {p:shape()}}, {nil, {ROWS, COLUMNS}})
  end
  local function part(runs, size, full, dim)
    return {dim = dim or 0, full = full or ROWS, size = size or 5, runs = runs}
  end
  refused(part({{0, 3}, {2, 1}}), "overlap")
  refused(part({{10, 3}}), "a run of 3 from 10 on does not lie within 12")
  refused(part({{-1, 3}}), "a run of 3 from %-1 on")
  refused(part({{0, 3}, {3, 3}}), "runs of 6 in all do not fit into a part of 5")
  refused(part({{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}}), "at most 4 runs")
  refused(part({{0, 3}}, 5, 11), "12 long, not 11")
  refused(part({{0, 3}}, 5, 12, 2), "none of them")
  local p = core.param("v", {4})
  core.shard(p, {dim = 0, full = 4, size = 2, runs = {{2, 2}}})
  p:copy_(rille.tensor{1, 2})
  check.raises(function() core.shard(p) end, "values given for the part")
end)

check.test("shard: an allocation that fails leaves the parameter as it was; no leak", function()
  local function live()
    collectgarbage()
    collectgarbage()
    return core.memory().total.current
  end
  local before = live()
  local whole, p = declare("f32", "normal"):tolist(), declare("f32", "normal")
  p:tolist()
  local done, n = false, 0
  while not done do
    n = n + 1
    core.fail_at(n)
    done = pcall(core.shard, p, GROUPS[0][1])
    core.fail_at(0)
    check.equal({p:tolist(), core.shard_of(p)},
      done and {cut(whole, GROUPS[0][1]), GROUPS[0][1]} or {whole, nil})
  end
  check.ok(n > 2)
  p = nil -- luacheck: ignore 311
  check.equal(live(), before)
end)

check.test("fingerprints: those of the parts add up to that of the whole", function()
  for _, dtype in ipairs{"f32", "f64", "bf16"} do
    local whole = core.fingerprint(declare(dtype, "normal"))
    for dim = 0, 1 do
      local sum = 0
      for _, shard in ipairs(GROUPS[dim]) do
        local p = declare(dtype, "normal")
        core.shard(p, shard)
        sum = sum + core.fingerprint(p)
        check.equal(core.fingerprint(p, p:detach():clone()), core.fingerprint(p))
        rille.no_grad(function() -- padding does not matter
          local list = places(shard)
          for i, at in ipairs(list) do
            if not at then p:slice(dim, i - 1, i):fill_(9) end
          end
        end)
        sum = sum + core.fingerprint(p)
      end
      check.equal(sum, 2 * whole)
    end
  end
  -- more than a block
  local function large() return core.param("e", {700, 300}):normal_() end
  local sum, whole = 0, core.fingerprint(large())
  for k = 0, 2 do
    local p = large()
    core.shard(p, {dim = 1, full = 300, size = 110, runs = {{100 * k, 60}, {100 * k + 60, 40}}})
    sum = sum + core.fingerprint(p)
  end
  check.equal(sum, whole)
end)

check.test("norms: counted runs alone, so that those of the parts add up to the whole's", function()
  local rows = {}
  for r = 1, ROWS do
    rows[r] = {}
    for c = 1, COLUMNS do rows[r][c] = (r * 17 + c * 5) % 13 - 6.0 end -- exact in f32
  end
  local squares = 0
  for _, row in ipairs(rows) do for _, g in ipairs(row) do squares = squares + g * g end end
  for dim = 0, 1 do
    local sum = 0
    for _, shard in ipairs(GROUPS[dim]) do
      local p = declare("f32", "normal")
      core.shard(p, shard)
      local set, mine = core.weightset{p}, cut(rows, shard)
      set:finish_grads()
      local list, largest = places(shard), 0
      local counted = {}
      for _, run in ipairs(shard.runs) do
        for _ = 1, run[2] do counted[#counted + 1] = run[3] end
      end
      for r, row in ipairs(mine) do
        for c in ipairs(row) do
          local i = dim == 0 and r or c
          if not list[i] or not counted[i] then row[c] = 100.0 -- must not show
          else largest = math.max(largest, math.abs(row[c])) end
        end
      end
      local grad = rille.tensor(mine):reshape(-1)
      set:grad():slice(0, 0, grad:numel()):copy_(grad)
      sum = sum + set:grad_norms()[1]
      check.equal(set:grad_norms(true), {largest + 0.0})
    end
    check.equal(sum, squares)
  end
end)

check.test("a part without a run is padding alone", function()
  local p = declare("f32", "normal")
  core.shard(p, {dim = 0, full = ROWS, size = 2, runs = {{ROWS, 0}}})
  check.equal({p:square():sum():item(), core.fingerprint(p)}, {0.0, 0})
  local set = core.weightset{p}
  set:finish_grads()
  set:grad():fill_(1)
  check.equal({set:grad_norms()[1], set:grad_norms(true)[1]}, {0.0, 0.0})
end)

--- The whole's gradient and output of an embedding, and each part's.
local function embed(weight, ids, seed, options)
  local w = rille.tensor(weight, {dtype = "f64", requires_grad = true})
  local out = rille.embedding(w, ids, options)
  out:backward(seed)
  return out:detach(), w:grad():tolist()
end

check.test("embedding: parts of a table add up to it, and their gradients are its rows", function()
  rille.manual_seed(3)
  local table_ = rille.randn(7, 3):tolist()
  local ids = rille.tensor({{0, 6, 3, 3}, {2, 5, 4, 6}}, {dtype = "i64"})
  local seed = rille.randn(2, 4, 3):to("f64")
  local whole, grad = embed(table_, ids, seed)
  local sum = rille.zeros(2, 4, 3, {dtype = "f64"})
  for first = 0, 8, 2 do -- of the last two one has one row of padding, one nothing else
    local rows, expected = {}, {}
    for i = 1, 2 do
      rows[i] = table_[first + i] or {9.0, 9.0, 9.0}
      expected[i] = grad[first + i] or {0.0, 0.0, 0.0}
    end
    local out, part = embed(rows, ids, seed, {first = first, vocab = 7})
    sum = sum + out
    check.equal(part, expected)
  end
  check.equal(sum:tolist(), whole:tolist())
  local w = rille.zeros(2, 3)
  for _, id in ipairs{-1, 7} do
    check.raises(function()
      rille.embedding(w, rille.tensor({id}, {dtype = "i64"}), {first = 4, vocab = 7})
    end, "0 to 6")
  end
  check.raises(function() rille.embedding(w, ids, {first = 2}) end, "a part of a table says")
end)

check.test("dropout: a part of an activation gets its part of the mask, backward too", function()
  local shape <const> = {3, 6, 10}
  local function step(x, part)
    local y, grad
    rille.manual_seed(5)
    core.begin_step(4)
    core.begin_microbatch(0, 2, 3)
    core.module_call("h.0", function()
      y = rille.dropout(x, 0.5, part)
      y:sum():backward()
      y, grad = y:tolist(), x:grad():tolist()
    end)
    core.end_microbatch()
    core.end_step()
    return y, grad
  end
  for _, dtype in ipairs{"f32", "f64", "bf16"} do
    local function values() return rille.arange(180):reshape(shape):to(dtype) end
    local whole, grad = step(values():detach():requires_grad_())
    local function slice(nested, dim, from, to)
      return rille.tensor(nested):slice(dim, from, to):tolist()
    end
    for dim = 1, 2 do
      local full, from = shape[dim + 1], 0
      for _, size in ipairs(dim == 1 and {2, 2, 2} or {5, 3, 2}) do
        local x = values():slice(dim, from, from + size):contiguous():detach():requires_grad_()
        local y, dx = step(x, {dim = dim - (size == 2 and 3 or 0), at = from, full = full})
        check.equal({y, dx}, {slice(whole, dim, from, from + size),
          slice(grad, dim, from, from + size)})
        from = from + size
      end
    end
  end
  local x = rille.ones(2, 4)
  check.raises(function() rille.dropout(x, 0.5, {dim = 1, at = 5, full = 8}) end, "4 from 5 on")
  check.raises(function() rille.dropout(x, 0.5, {dim = 2, at = 0, full = 8}) end, "none of them")
  check.raises(function() rille.dropout(x, 0.5, {dim = 0, at = 0, full = 4}) end, "no part of")
  check.raises(function() rille.dropout(x, 0.5, {at = 0, full = 8}) end, "dim, at and full")
end)

check.done()
