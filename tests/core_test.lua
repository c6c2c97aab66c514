local check <const> = require "tests.check"
local rille <const> = require "rille"
local core <const> = rille.core
local tensor <const> = rille.tensor

check.test("a profile counts calls and flops by op, products by shape", function()
  local a, b = rille.randn(2, 5, 3), rille.randn(5, 3, 4):requires_grad_()
  rille.core.profile(true)
  for _ = 1, 3 do a:view(5, 2, 3):matmul(b):sum():backward() end
  local rows = {}
  for _, row in ipairs(rille.core.profile(false)) do
    rows[row.what] = row
    check.ok(row.seconds > 0 and row.seconds < 5)
  end
  check.equal({ rows["matmul 10x3x4"].calls, rows["matmul 10x3x4"].flops },
    { 3, 3 * 2.0 * 10 * 3 * 4 })
  check.equal(rows["matmul 15x2x4"].calls, 3) -- the gradient of b
  check.equal({ rows.sum.calls, rows.sum.flops }, { 3, 0.0 })
  check.equal(rille.core.profile(false), {})
end)

check.test("param: declared without storage, placed at first touch, values follow seed and name",
  function()
    rille.manual_seed(7)
    local w = core.param("h.0.w", {3, 4}):normal_(0, 0.02)
    check.equal({w:is_placed(), w:name(), w:requires_grad(), w:is_param()}, {false, "h.0.w", true,
      true})
    check.ok(tostring(w):find("no storage yet", 1, true))
    local values = (w * 1):tolist()
    check.ok(w:is_placed())
    local v = core.param("other", {3, 4}):normal_(0, 0.02)
    v:rename("h.0.w")
    check.equal(v, values)
    check.equal(core.param("c", {2}):fill_(1.5), {1.5, 1.5})
    check.equal(core.param("d", {2}):copy_(tensor{1, 2}), {1.0, 2.0})
    check.raises(function() core.param("e", {2}):copy_(tensor{1, 2, 3}) end, "its own shape")
    check.raises(function() core.param("e", {2}, {dtype = "i64"}) end, "f32, f64 or bf16")
  end)

check.test("weightset: flat storage, gradients, optimizer steps", function()
  local a = core.param("a", {2, 2}):fill_(1)
  local b = core.param("b", {3}):fill_(2)
  local set = core.weightset({a, b}, 0)
  check.equal({set:numel() % 16, #set:params(), set:dtype(), set:group()}, {0, 2, "f32", 0})
  check.equal(b, {2.0, 2.0, 2.0})
  ;(a:sum() + (b * b):sum()):backward()
  set:finish_grads()
  check.equal(a:grad(), {{1.0, 1.0}, {1.0, 1.0}})
  check.equal(b:grad(), {4.0, 4.0, 4.0})
  check.equal(set:grad_norms(), {4.0, 48.0})
  check.equal(set:grad_norms(true), {1.0, 4.0})
  local version = set:version()
  set:sgd{lr = 0.5}
  check.equal(b, {0.0, 0.0, 0.0})
  check.ok(set:version() > version)
  set:zero_grads()
  check.equal(a:grad(), nil)
  check.raises(function() set:adamw{lrr = 1} end, "no option \"lrr\"", "\"lr\"")
  check.ok(core.fingerprint(a) ~= core.fingerprint(b))
  check.equal(set:state_of(b, 0), nil)
  b:sum():backward()
  set:adamw{lr = 0.1, step = 1}
  check.near(set:state_of(b, 0), {0.1, 0.1, 0.1}, 1e-6)
  check.near(b, {-0.1, -0.1, -0.1}, 1e-5)
end)

check.test("frozen parameters get no gradient", function()
  local w = core.param("w", {2}):fill_(1):freeze()
  local v = core.param("v", {2}):fill_(1)
  ;(w * v):sum():backward()
  check.equal({w:grad() == nil, v:grad():tolist()}, {true, {1.0, 1.0}})
  w:freeze(false)
  check.ok(w:requires_grad())
end)

check.test("scope: what is neither returned nor saved is gone, and says to which step it belonged",
  function()
    local inner
    core.begin_step(12)
    core.begin_microbatch(3, 0, 4)
    local y, list = core.scope(function()
      inner = rille.ones(4)
      return inner * 2, {rille.ones(2)}
    end)
    check.equal({y:tolist(), list[1]:tolist()}, {{2.0, 2.0, 2.0, 2.0}, {1.0, 1.0}})
    check.raises(function() return inner + 1 end, "belongs to step 12, microbatch 3", "x:keep%(%)")
    check.raises(function() return inner:tolist() end, "belongs to step 12")
    check.raises(function() inner:fill_(1) end, "belongs to step 12")
    check.ok(tostring(inner):find("released", 1, true))
    core.scope(function() inner = rille.ones(3):keep() end)
    check.equal(inner, {1.0, 1.0, 1.0})
    pcall(core.scope, function() core.scope(error, "x") end)
    core.end_microbatch()
    core.end_step()
    check.equal(rille.ones(2) + 1, {2.0, 2.0})
  end)

check.test("arenas: saved bytes are counted, and gone after backward", function()
  local w = core.param("w", {8, 8}):normal_(0, 1)
  local x = core.data(rille.randn(4, 8))
  core.begin_step(0)
  core.begin_microbatch(0, 0, 4)
  local y = core.scope(function() return x:matmul(w):tanh():sum() end)
  local bytes = core.arena_bytes()
  check.equal({bytes.I, bytes.W}, {4 * 8 * 4, 4 * 8 * 4}) -- tanh keeps its output, matmul x
  local rest = core.backward({y}, nil, "I")
  bytes = core.arena_bytes()
  check.equal({bytes.I, bytes.W}, {0, 2 * 4 * 8 * 4}) -- x, and the gradient of matmul's output
  rest:run()
  bytes = core.arena_bytes()
  check.equal({bytes.I, bytes.W}, {0, 0})
  check.raises(function() rest:run() end, "has run already")
  core.end_microbatch()
  core.end_step()
end)

check.test("modules: errors name the path, which comes back after an error", function()
  local x = rille.ones(2, 3)
  local words = check.raises(function()
    core.module_call("h.3", function() core.module_call("h.3.mlp", function() x:matmul(x) end) end)
  end, "core_test.lua:%d+: matmul", "\n    in h.3.mlp\n")
  check.ok(not words:find("rille/"))
  check.equal(core.module_path(), "")
  check.equal({core.module_call("a", function(...) return core.module_path(), ... end, 1, 2)},
    {"a", 1, 2})
  core.module_enter("b")
  check.equal(core.module_path(), "b")
  core.module_leave()
  check.equal(core.module_path(), "")
end)

check.test("dropout: the mask does not depend on how a batch is cut into microbatches", function()
  rille.manual_seed(5)
  local x = rille.ones(4, 16)
  local function masks(...)
    local rows, first = {}, 0
    core.begin_step(2)
    for i, n in ipairs{...} do
      core.begin_microbatch(i - 1, first, n)
      local y = core.module_call("h.0", function()
        return {rille.dropout(rille.ones(n, 16), 0.5):tolist(),
          rille.dropout(rille.ones(n, 16), 0.5):tolist(), rille.randn(n, 3):tolist()}
      end)
      for k = 1, n do rows[#rows + 1] = {y[1][k], y[2][k], y[3][k]} end
      core.end_microbatch()
      first = first + n
    end
    core.end_step()
    return rows
  end
  local whole = masks(4)
  check.equal(masks(1, 3), whole)
  check.equal(masks(2, 2), whole)
  check.ok(not pcall(check.equal, whole[1][1], whole[1][2]), "two calls, two masks")
  check.ok(not pcall(check.equal, whole[1][1], whole[2][1]), "two samples, two masks")
  check.raises(function() rille.dropout(x, 1.5) end, "dropout")
end)

check.test("accounting: memory by kind, flops, clock, spans", function()
  local before = core.memory().activations.current
  local x = rille.zeros(1024)
  check.equal(core.memory().activations.current - before, 4096)
  check.ok(core.memory().limit > 0 and core.memory().total.peak >= core.memory().total.current)
  core.flops(true)
  rille.ones(2, 3):matmul(rille.ones(3, 4))
  check.ok(core.flops() >= 2 * 2 * 3 * 4)
  local t = core.clock()
  core.spans(true)
  core.span("F0", t, t + 1, 0.5)
  check.equal(core.spans_list()[1].what, "F0")
  local path = os.tmpname()
  core.write_trace(path)
  check.ok(io.open(path):read("a"):find("\"F0\"", 1, true))
  os.remove(path)
  core.spans(false)
  check.raises(function() core.write_trace(path) end, "no spans")
  check.equal(x:numel(), 1024)
end)

check.test("the n-th allocation fails: an error, no leak, and the next call works", function()
  local w = core.param("w", {4, 4}):normal_(0, 1)
  local function work()
    local y = rille.ones(2, 4):matmul(w):tanh():sum()
    y:backward()
    w:zero_grad()
    return y:item()
  end
  local want = work()
  collectgarbage()
  local live, failed = core.memory().total.current, 0
  for n = 1, 60 do
    core.fail_at(n)
    local passed, err = pcall(work)
    core.fail_at(0)
    if not passed then
      failed = failed + 1
      check.ok(err:find("out of memory"), err)
    end
  end
  check.ok(failed > 10, failed)
  check.equal(work(), want)
  collectgarbage()
  collectgarbage()
  check.equal(core.memory().total.current, live)
end)

check.test("garbage: tensor bytes drive Lua's collector", function()
  collectgarbage()
  core.reset_peaks()
  local before = core.memory().activations.current
  for _ = 1, 1000 do rille.empty(1 << 18) end
  local peak = core.memory().activations.peak - before
  check.ok(peak < 200 << 20, peak)
end)

--- The address sanitizer keeps freed memory, so the resident size says nothing under it.
local function is_sanitized()
  for line in io.lines("/proc/self/maps") do
    if line:find("libasan", 1, true) then return true end
  end
end

check.test("the n-th allocation fails inside checkpoints, user ops and assignments: no leak",
  function()
    local w = core.param("w", {4, 4}):normal_(0, 1)
    local double = rille.op{name = "double", forward = function(c, x) c:save(x) return x * 2 end,
      backward = function(c, dy) return dy * 2 + c:saved() * 0 end}
    local function block(x) return rille.dropout(double(x:matmul(w)), 0.5) end
    local function work()
      core.begin_step(0)
      core.begin_microbatch(0, 0, 2)
      local passed, result = pcall(core.scope, function()
        local x = core.data(rille.ones(2, 4))
        x[0] = tensor{1, 2, 3, 4}
        x[x:gt(3)] = 0
        local y = rille.checkpoint(block, rille.checkpoint(block, x))
        local rest = core.backward({y:square():sum()}, nil, "I")
        rest:run()
        return y:sum():item()
      end)
      core.end_microbatch()
      core.end_step()
      w:zero_grad()
      if not passed then error(result, 0) end
      return result
    end
    local want = work()
    collectgarbage()
    collectgarbage()
    local live, failed = core.memory().total.current, 0
    for n = 1, 400 do
      core.fail_at(n)
      local passed, err = pcall(work)
      core.fail_at(0)
      if not passed then
        failed = failed + 1
        check.ok(err:find("out of memory"), err)
      end
    end
    check.ok(failed > 50, failed)
    check.equal(work(), want)
    collectgarbage()
    collectgarbage()
    check.equal(core.memory().total.current, live)
    local bytes = core.arena_bytes()
    check.equal({bytes.I, bytes.W}, {0, 0})
  end)

check.test("10,000 small steps keep the resident size flat", function()
  if is_sanitized() then return check.skip("the resident size under the address sanitizer") end
  local function resident()
    for line in io.lines("/proc/self/status") do
      local kb = line:match("VmRSS:%s+(%d+)")
      if kb then return tonumber(kb) end
    end
  end
  local w = core.param("w", {32, 32}):normal_(0, 0.1)
  local x = rille.randn(16, 32)
  local function steps(n)
    for _ = 1, n do
      x:matmul(w):tanh():square():mean():backward()
      w:zero_grad()
    end
  end
  steps(1000)
  local before = resident()
  steps(9000)
  check.ok(resident() - before < 8000, resident() - before)
end)

check.done()
