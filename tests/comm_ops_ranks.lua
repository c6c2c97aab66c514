-- comm_ops_ranks - the differentiable collectives on several ranks, for tests/comm_ops_test.sh.
-- Every rank can compute any rank's input, and so what it must get; gradients are checked by finite
-- differences of the losses of all ranks.
local rille = require "rille"
local core <const> = rille.core

local world <const> = core.comm_world()
local n_failed, first = 0, nil

--- Counts what does not hold on this rank.
local function expect(condition, words, ...)
  if condition then return end
  n_failed = n_failed + 1
  first = first or words:format(...)
end

--- Says on rank 0 whether the claim held on all ranks.
local function claim(words)
  local failed <const> = rille.tensor(n_failed)
  world:all_reduce(failed)
  if first then io.stderr:write(("rank %d: %s: %s\n"):format(world:rank(), words, first)) end
  if world:rank() == 0 then print((failed:item() == 0 and "ok " or "not ok ") .. words) end
  io.stdout:flush()
  if failed:item() > 0 then core.give_up("a claim does not hold") end
end

--- Numbers of no pattern, the same wherever (seed, rank) are.
local function numbers(seed, rank, shape, dtype)
  rille.manual_seed(1000 * seed + rank)
  local x <const> = rille.randn(shape, { dtype = "f64" })
  if dtype == "f64" then return x end
  if dtype == "i64" or dtype == "u8" then return (x * 40):abs():to(dtype) end
  if dtype == "bool" then return x:gt(0) end
  return x:to(dtype)
end

local function same(a, b) -- bit for bit
  if a:dtype() ~= b:dtype() or a:ndim() ~= b:ndim() then return false end
  for d = 0, a:ndim() - 1 do
    if a:size(d) ~= b:size(d) then return false end
  end
  return a:numel() == 0 or a:eq(b):all():item()
end

local function sum_in_order(list)
  local wide <const> = list[1]:dtype() == "bf16" and "f32" or list[1]:dtype()
  local sum = list[1]:to(wide)
  for i = 2, #list do sum = sum + list[i]:to(wide) end
  return sum:to(list[1]:dtype())
end

local function part(x, dim, rank, n)
  local size <const> = x:size(dim) // n
  return x:slice(dim, rank * size, (rank + 1) * size):contiguous()
end

-- ---- the rows: what a rank must get from all ranks' inputs, and the convention of its gradient
--
-- same_x: x is replicated; same_y: what follows is, and its loss counts once.

local rows <const> = {
  copy_to = { same_x = true, want = function(xs, me) return xs[me + 1] end },
  reduce_from = { same_y = true, sums = true, want = function(xs) return sum_in_order(xs) end },
  all_gather = { want = function(xs, _, _, o) return rille.cat(xs, o.dim) end },
  reduce_scatter = { sums = true, divides = "dim",
    want = function(xs, me, n, o) return part(sum_in_order(xs), o.dim, me, n) end },
  gather_from = { same_y = true, want = function(xs, _, _, o) return rille.cat(xs, o.dim) end },
  scatter_to = { same_x = true, divides = "dim",
    want = function(xs, me, n, o) return part(xs[1], o.dim, me, n) end },
  all_to_all = { divides = "split", want = function(xs, me, n, o)
    local parts = {}
    for i, x in ipairs(xs) do parts[i] = part(x, o.split, me, n) end
    return rille.cat(parts, o.cat)
  end },
  broadcast = { want = function(xs, _, _, o) return xs[(o.root or 0) + 1] end },
}

--- The calls of a row for a group of n: {shape, options, perm}; perm makes x a view with strides.
local function cases_of(name, n)
  if name == "copy_to" or name == "reduce_from" then
    return { { { 3, 5 }, {} }, { { 7 }, {} }, { {}, {} }, { { 2, 3, 4 }, {}, { 2, 0, 1 } },
      { { 0, 3 }, {} }, { { 40, 70 }, {} } }
  elseif name == "broadcast" then
    return { { { 3, 5 }, {} }, { { 2, 3, 4 }, { root = n - 1 }, { 1, 2, 0 } },
      { {}, { root = n // 2 } } }
  elseif name == "all_to_all" then
    return { { { n * 2, 3 }, { split = 0, cat = 1 } }, { { 3, 2 * n }, { split = 1, cat = 0 } },
      { { 2, n, 3 * n, 2 }, { split = 2, cat = 1 } }, { { 1, 2 * n, 3 }, { split = 1, cat = 1 } },
      { { 2 * n, 2, 3 }, { split = -1, cat = 0 }, { 1, 2, 0 } },
      { { 2, 3 * n, 4 }, { split = -2, cat = 2 } }, { { n, 5 }, { split = 0, cat = 0 } },
      { { 0, n }, { split = 1, cat = 0 } }, { { 2 * n, 40, 30 }, { split = 0, cat = 2 } } }
  end
  return { { { 2 * n, 3 }, { dim = 0 } }, { { 3, 2 * n }, { dim = 1 } },
    { { 2, n, 3 }, { dim = 1 } }, { { 1, 2 * n, 3 }, { dim = 1 } },
    { { 2, 3, 4 * n }, { dim = -1 } }, { { n }, { dim = 0 } },
    { { 2, 3, 2 * n }, { dim = 0 }, { 2, 1, 0 } }, { { 3, n, 2 }, { dim = 2 }, { 2, 0, 1 } },
    { { 0, 2 * n }, { dim = 1 } }, { { 3, 20 * n, 35 }, { dim = 1 } } }
end

local names <const> = {}
for name in pairs(rows) do names[#names + 1] = name end
table.sort(names)

local function options_of(case, group)
  local options <const> = { group = group }
  for key, value in pairs(case[2]) do options[key] = value end
  return options
end

local function describe(name, case, dtype)
  local words = {}
  for key, value in pairs(case[2]) do words[#words + 1] = key .. " " .. value end
  return ("%s of {%s} %s, %s%s"):format(name, table.concat(case[1], ", "), dtype,
    table.concat(words, " "), case[3] and ", strided" or "")
end

--- x as the case has it, from a leaf of the shape in memory.
local function shown(leaf, case) return case[3] and leaf:permute(case[3]) or leaf end

local function input(name, case, seed, rank, dtype)
  return numbers(seed, rows[name].same_x and 0 or rank, case[1], dtype)
end

-- ---- forward

local function try_forward(name, case, group, seed, dtype)
  local me <const>, n <const> = group:rank(), group:size()
  local xs = {}
  for rank = 0, n - 1 do xs[rank + 1] = shown(input(name, case, seed, rank, dtype), case) end
  local want <const> = rows[name].want(xs, me, n, case[2])
  local x <const> = xs[me + 1]
  local before <const> = x:clone()
  local y <const> = core[name](x, options_of(case, group))
  expect(same(y, want), "%s: wrong values", describe(name, case, dtype))
  expect(same(x, before), "%s: its input has changed", describe(name, case, dtype))
  if rows[name].sums and dtype ~= "f64" and x:numel() > 0 then
    local exact = {}
    for i, other in ipairs(xs) do exact[i] = other:to("f64") end
    local error <const> = (y:to("f64") - rows[name].want(exact, me, n, case[2])):abs():max():item()
    expect(error < (dtype == "f32" and 2e-6 or 0.1), "%s: off by %g from f64",
      describe(name, case, dtype), error)
  end
  local shape <const> = core[name](x:to("meta"), options_of(case, group))
  expect(shape:ndim() == y:ndim() and shape:numel() == y:numel(), "%s: another shape on meta",
    describe(name, case, dtype))
end

-- ---- gradients

--- The gradient of the leaf: the row's, with c as that of y.
local function gradient(name, case, group, seed, dtype)
  local leaf <const> = input(name, case, seed, group:rank(), dtype):requires_grad_()
  local y <const> = core[name](shown(leaf, case), options_of(case, group))
  local c = numbers(seed + 500, rows[name].same_y and 0 or group:rank(), { y:shape() }, dtype)
  core.backward({ y }, { c })
  return leaf:grad(), c
end

--- The loss of all ranks of the group with element `at` of rank `who`'s leaf moved by `by`.
local function loss(name, case, group, seed, c, who, at, by)
  local me <const> = group:rank()
  local leaf <const> = input(name, case, seed, me, "f64")
  if rows[name].same_x or who == me then
    local flat <const> = leaf:view(leaf:numel())
    flat[at] = flat[at]:item() + by
  end
  local sum = (core[name](shown(leaf, case), options_of(case, group)) * c):sum()
  if not rows[name].same_y then group:all_reduce(sum) end
  return sum:item()
end

local function try_gradient(name, case, group, seed)
  local g <const>, c <const> = gradient(name, case, group, seed, "f64")
  if g:numel() == 0 then return end
  local flat <const> = g:contiguous():view(g:numel())
  for who = 0, group:size() - 1 do
    for k = 0, 2 do
      local at <const> = (k * 7919 + who) % g:numel()
      local h <const> = 0.125
      local up <const> = loss(name, case, group, seed, c, who, at, h)
      local down <const> = loss(name, case, group, seed, c, who, at, -h)
      local want <const>, got <const> = (up - down) / (2 * h), flat[at]:item()
      local moved <const> = rows[name].same_x or who == group:rank()
      expect(not moved or math.abs(got - want) < 1e-9 * math.max(1, math.abs(up)),
        "%s: the gradient of element %d of rank %d is %.12g, finite differences give %.12g",
        describe(name, case, "f64"), at, who, got, want)
    end
  end
  for _, dtype in ipairs { "f32", "bf16" } do
    local narrow <const> = gradient(name, case, group, seed, dtype)
    local error <const> = (narrow:to("f64") - g):abs():max():item()
    expect(narrow:dtype() == dtype and error < (dtype == "f32" and 1e-5 or 0.15),
      "%s: its gradient is off by %g from f64", describe(name, case, dtype), error)
  end
end

local function try_group(group)
  local seed = 0
  for _, name in ipairs(names) do
    local dtypes <const> = { "f32", "f64", "bf16" }
    if not rows[name].sums then table.move({ "i64", "u8", "bool" }, 1, 3, 4, dtypes) end
    for _, case in ipairs(cases_of(name, group:size())) do
      seed = seed + 1
      for _, dtype in ipairs(dtypes) do try_forward(name, case, group, seed, dtype) end
      try_gradient(name, case, group, seed)
    end
  end
end

-- ---- column_linear: linear after copy_to, or after all_gather, bit for bit

--- Its call, or that of the two rows it stands for, and all gradients; half: "B", or "I" then W.
local function linear_run(case, group, dtype, fused, half)
  local me <const>, k <const>, rows_of_w <const> = group:rank(), case.k, case.rows
  local x = numbers(900, case.sequence and me or 0, case.shape, dtype)
  local leaf <const> = core.data(x:requires_grad_())
  x = case.perm and leaf:permute(case.perm) or leaf
  if case.twice then x = x * 2 end -- its gradient has a place already when ours comes
  local w <const> = numbers(901, me, { rows_of_w, k }, dtype):requires_grad_()
  local bias <const> = case.bias and numbers(902, me, { rows_of_w }, dtype):requires_grad_() or nil
  local function apply()
    if fused then
      local column = case.sequence and core.column_linear_time or core.column_linear
      return column(x, w, bias, { group = group, act = case.act })
    end
    local all <const> = case.sequence and core.all_gather(x, { group = group, dim = 1 })
      or core.copy_to(x, { group = group })
    return rille.linear(all, w, bias, { act = case.act })
  end
  local y <const> = apply()
  local outs <const>, douts <const> = { y }, { numbers(903, me, { y:shape() }, dtype) }
  if case.transposed then douts[1] = numbers(903, me, { y:t():shape() }, dtype):t() end
  if case.twice then outs[2], douts[2] = x, numbers(904, 0, { x:shape() }, dtype) end
  if case.again then outs[2], douts[2] = apply(), numbers(904, me, { y:shape() }, dtype) end
  local later <const> = core.backward(outs, douts, half)
  if half == "I" then
    expect(case.again or w:grad() == nil, "the gradient of w is there before W") -- or ran early
    expect(leaf:grad() ~= nil, "the gradient of x is not there after I")
    later:run()
  end
  return { y, leaf:grad(), w:grad(), bias and bias:grad() or w:grad() }
end

local function try_linear(group)
  local n <const> = group:size()
  for _, case in ipairs {
    { shape = { 3, 4, 5 }, k = 5, rows = 6, act = 0 },
    { shape = { 7, 5 }, k = 5, rows = 3, act = 2, bias = true },
    { shape = { 5 }, k = 5, rows = 4, act = 4, bias = true },
    { shape = { 5, 4, 3 }, k = 5, rows = 6, act = 1, perm = { 2, 1, 0 }, bias = true },
    { shape = { 2, 4, 5 }, k = 5, rows = 6, act = 0, bias = true, twice = true },
    { shape = { 2, 4, 5 }, k = 5, rows = 4, act = 0, bias = true, transposed = true },
    { shape = { 3, 4, 5 }, k = 5, rows = 6, act = 3, bias = true, sequence = true },
    { shape = { 1, 4, 5 }, k = 5, rows = 6, act = 0, sequence = true },
    { shape = { 5, 4, 2 }, k = 5, rows = 2, act = 2, perm = { 2, 1, 0 }, bias = true,
      sequence = true },
    { shape = { 2, 4, 5 }, k = 5, rows = 6, act = 2, bias = true, again = true },
    { shape = { 2, 3, 5 }, k = 5, rows = 2, act = 2, bias = true, sequence = true, again = true },
    { shape = { 2, 3, 5 }, k = 5, rows = 2, act = 0, sequence = true, twice = true },
    { shape = { 2, 3, 5 }, k = 5, rows = 2, act = 0, sequence = true, transposed = true },
    { shape = { 4, 160, 96 }, k = 96, rows = 200, act = 2, bias = true, sequence = true },
    { shape = { 4, 160, 96 }, k = 96, rows = 200, act = 0, bias = true },
  } do
    for _, dtype in ipairs { "f32", "f64", "bf16" } do
      local words <const> = ("column_linear of {%s}, act %d, sequence %s, %s"):format(
        table.concat(case.shape, ", "), case.act, case.sequence, dtype)
      local want <const> = linear_run(case, group, dtype, false, "B")
      for _, half in ipairs { "B", "I" } do
        local got <const> = linear_run(case, group, dtype, true, half)
        for i, what in ipairs { "y", "dx", "dw", "dbias" } do
          expect(same(got[i], want[i]), "%s: another %s (%s)", words, what, half)
        end
      end
      if case.sequence then
        local before <const> = numbers(900, 0, case.shape, dtype)
        local x <const> = case.perm and before:permute(case.perm) or before
        local w <const> = rille.zeros(case.rows, case.k, { dtype = dtype, device = "meta" })
          :requires_grad_()
        local y <const> = core.column_linear_time(x:to("meta"), w, { group = group })
        expect(y:size(1) == n * x:size(1), "%s: another shape on meta", words)
        core.backward({ y }, { rille.zeros({ y:shape() }, { dtype = dtype }):to("meta") })
      end
    end
  end
  local x <const>, w <const> = rille.zeros(2, 3, 5), rille.zeros(4, 6)
  for _, name in ipairs { "column_linear", "column_linear_time" } do
    local passed, err = pcall(core[name], x, w, { group = group })
    expect(not passed and err:find(name .. ": the last size of x must be 6, x is f32[2, 3, 5]",
      1, true), "wrong sizes: %s", err)
  end
  local passed, err = pcall(core.column_linear_time, x[0], rille.zeros(4, 5), { group = group })
  expect(not passed and err:find("column_linear_time: x must be [B, T/n, K]", 1, true),
    "a sequence of two dimensions: %s", err)
  passed, err = pcall(core.column_linear, x, rille.zeros(4, 5), { group = group, act = 9 })
  expect(not passed and err:find("column_linear: there is no act 9", 1, true), "act 9: %s", err)
end

-- While the first rank waits for the others in an I, the weight gradients of an I before it run;
-- but none that calls other ranks.
local function try_early(group)
  for _, name in ipairs { "column_linear", "column_linear_time" } do
    local ws <const>, later <const> = {}, {}
    for i = 1, 2 do
      local x <const> = core.data(numbers(910 + i, 0, { 2, 3, 5 }, "f32"):requires_grad_())
      ws[i] = numbers(920 + i, group:rank(), { 4, 5 }, "f32"):requires_grad_()
      local y <const> = core[name](x, ws[i], { group = group })
      if i == 2 and group:rank() > 0 then
        local since <const> = core.clock()
        while core.clock() - since < 0.1 do end
      end
      later[i] = core.backward({ y }, { numbers(930, group:rank(), { y:shape() }, "f32") }, "I")
    end
    local ran <const> = ws[1]:grad() ~= nil
    expect(name == "column_linear_time" and not ran or ran or group:rank() > 0,
      "%s: %s", name, ran and "a weight gradient ran early" or "none ran early")
    for i = 1, 2 do later[i]:run() end
    expect(ws[1]:grad() and ws[2]:grad(), "a gradient is missing")
  end
end

-- ---- what is refused

local function try_refusals(group)
  local n <const> = group:size()
  local x <const> = rille.zeros(2, n + 1, 3)
  local function refused(name, t, options, ...)
    local passed, err = pcall(core[name], t, options)
    expect(not passed, "%s is not refused", name)
    for _, words in ipairs { ... } do
      expect(tostring(err):find(words, 1, true), "%s: %s has no %q", name, err, words)
    end
  end
  for _, name in ipairs(names) do
    refused(name, x, nil, name .. ": group is missing")
    refused(name, x, { group = 3 }, name .. ": group must be a group of ranks, got number")
    refused(name, x, { group = group, dmi = 1 }, name .. ': there is no option "dmi"')
    local key <const> = rows[name].divides
    if key and n > 1 then
      refused(name, x, { group = group, [key] = 1, cat = name == "all_to_all" and 0 or nil },
        name .. ": dimension 1 has " .. n + 1 .. " elements, which do not divide among the " .. n
        .. " ranks of the group, x is f32[2, " .. n + 1 .. ", 3]", "a multiple of " .. n,
        "comm_ops_ranks.lua:")
    end
    if key or name == "all_gather" or name == "gather_from" then
      local o <const> = { group = group, [key or "dim"] = 3, cat = key == "split" and 0 or nil }
      refused(name, x, o, name .. ": there is no dimension 3, x has 3")
    end
    if rows[name].sums then
      refused(name, rille.zeros(n, 2, { dtype = "i64" }), { group = group,
        dim = name == "reduce_scatter" and 0 or nil },
        name .. ": x must be floating point, it is i64")
    end
  end
  refused("broadcast", x, { group = group, root = n },
    ("broadcast: there is no rank %d in a group of %d"):format(n, n))
end

local function try_freed()
  local x <const> = rille.zeros(4):requires_grad_()
  local group <const> = world:split(0)
  local y <const> = core.copy_to(x, { group = group })
  group:free()
  local passed, err = pcall(core.backward, { y }, { rille.ones(4) })
  expect(not passed and tostring(err):find("copy_to: its group of ranks has been freed", 1, true),
    "backward over a freed group: %s", err)
  passed, err = pcall(core.copy_to, x, { group = group })
  expect(not passed and tostring(err):find("has been freed", 1, true), "a freed group: %s", err)
end

local function try_help()
  local found = 0
  rows.column_linear, rows.column_linear_time = {}, {} -- which try_linear tests
  for _, row in ipairs(core.comm_ops()) do
    expect(row.differentiable and #row.help > 10 and row.args:find("^group:group"), "%s", row.name)
    if rows[row.name] then found = found + 1 end
    expect(rows[row.name], "the row %s has no test", row.name)
    expect(rawget(rille, row.name) == nil, "%s is in rille", row.name)
  end
  expect(found == #names + 2, "rows are missing")
end

-- ---- ranks that disagree

if arg[1] == "sizes" then
  local x <const> = rille.zeros(4 + world:rank())
  local passed = pcall(core.all_gather, x, { group = world, dim = 0 })
  if not passed then io.stderr:write("caught\n") end
  return
end

try_group(world)
claim "collectives: values and gradients are those of all ranks' inputs"
local n <const> = world:size()
for _, tp in ipairs { 1, 2 } do
  if n % tp == 0 then
    local mesh <const> = core.mesh(world, { tp = tp })
    try_group(mesh:group("tp"))
    try_group(mesh:group("dp"))
  end
end
claim "collectives: in the groups of meshes"
try_linear(world)
claim "column_linear: the bits of linear after copy_to or all_gather, in B and in I then W"
if n > 1 then try_early(world) end
claim "a rank that waits in I runs weight gradients of an earlier one meanwhile"
try_refusals(world)
claim "collectives: what does not fit is refused, and names what was written"
try_freed()
claim "collectives: a freed group is an error"
try_help()
claim "collectives: each row is tested and has help"
