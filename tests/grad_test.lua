local check <const> = require "tests.check"
local rille <const> = require "rille"
local core <const> = rille.core
local tensor <const> = rille.tensor

local function leaf(values) return tensor(values, {requires_grad = true}) end

check.test("no_grad: as a function and as a closed variable, also when an error passes", function()
  local w = leaf{1.0, 2.0}
  local y, word = rille.no_grad(function(x, s) return x * 2, s end, w, "a")
  check.equal({y:requires_grad(), word}, {false, "a"})
  do
    local _ <close> = rille.no_grad()
    check.ok(not (w * 2):requires_grad())
    rille.enable_grad(function() check.ok((w * 2):requires_grad()) end)
  end
  check.ok((w * 2):requires_grad())
  pcall(rille.no_grad, function() error("x") end)
  check.ok(rille.is_grad_enabled())
end)

-- Whatever op hands one gradient on to several: who changes one of them, or what backward was
-- given, changes no other.
check.test("each leaf's gradient is its own", function()
  local both = rille.op { name = "both", forward = function(_, x, b) return x + b end,
    backward = function(_, dy) return dy, dy end }
  local shapes = {
    add = function(x, b) return x + b end,
    views = function(x, b) return x:view(-1) + b:view(-1) end,
    view = function(x, b) return x:view(3, 2) + 0 * b:view(3, 2) end,
    transposed = function(x, b) return x:t() + b:t() end,
    broadcast = function(x, b) return x:view(1, 2, 3) + b end,
    sliced = function(x, b) return x:slice(0, 0, 2) + b:slice(1, 0, 3) end,
    joined = function(x, b) return rille.cat({ x, b }, 0) end,
    stacked = function(x, b) return rille.stack { x, b } end,
    summed = function(x, b) return x:sum() + b:sum() end,
    cast = function(x, b) return (x:to("f64") + b:to("f64")):to("f32") end,
    custom = function(x, b) return both(x, b) end,
    checkpointed = function(x, b)
      return rille.checkpoint(function(u, v) return u + v end, x, b)
    end,
    itself = function(x) return x end,
  }
  for name, f in pairs(shapes) do
    for _, half in ipairs { "B", "I" } do
      for _, twice in ipairs { false, true } do
        local x, b = rille.ones(2, 3):requires_grad_(), rille.ones(2, 3):requires_grad_()
        local g
        for _ = 1, twice and 2 or 1 do
          local y = f(x, b)
          g = rille.full({ y:shape() }, 2.0)
          local w = core.backward({ y }, { g }, half)
          if w then w:run() end
        end
        local function differs(what, t, want)
          if t and not t:eq(want):all():item() then
            error(("%s, %s%s: %s has changed"):format(name, half, twice and " twice" or "", what))
          end
        end
        local dx, db = x:grad(), b:grad()
        local want_x, want_b = dx:clone(), db and db:clone()
        g:fill_(7)
        differs("x after the seed", dx, want_x)
        differs("b after the seed", db, want_b)
        dx:mul_(3)
        differs("b after x", db, want_b)
        differs("the seed after x", g, 7)
        differs("x itself", x:grad(), want_x * 3)
        if db then db:add_(1) end
        differs("x after b", dx, want_x * 3)
        differs("the seed after b", g, 7)
      end
    end
  end
end)

check.test("backward of a leaf or a parameter itself", function()
  for _, p in ipairs { core.param("p", { 1 }):fill_(3), leaf { 3.0 } } do
    p:backward()
    check.equal(p:grad():tolist(), { 1 })
    p:backward(tensor { 4.0 })
    local twice = p * 2
    twice:backward()
    check.equal(p:grad():tolist(), { 7 })
  end
end)

-- Between I and W the output gradients that W will read are not those of leaves.
check.test("a leaf's gradient that changes between I and W changes no weight's", function()
  local function run(changes)
    rille.manual_seed(1)
    local w, x = core.param("w", { 4, 4 }):normal_(0, 0.5), core.data(rille.randn(3, 4))
    local b = leaf(rille.ones(3, 4))
    local half = core.backward({ x:matmul(w) + b }, { rille.full({ 3, 4 }, 2.0) }, "I")
    if changes then b:grad():mul_(100) end
    half:run()
    return w:grad():tolist()
  end
  check.equal(run(true), run(false))
end)

check.test("I then W gives the gradients of B, bit for bit", function()
  local function run(half)
    rille.manual_seed(1)
    local w1 = core.param("w1", {8, 8}):normal_(0, 0.5)
    local w2 = core.param("w2", {8, 8}):normal_(0, 0.5)
    local x = core.data(rille.randn(4, 8))
    local y = (x:matmul(w1):tanh():matmul(w2) * w2:sum()):square():sum()
    local w = core.backward({y}, nil, half)
    if w then w:run() end
    return {w1:grad():tolist(), w2:grad():tolist()}
  end
  check.equal(run("I"), run("B"))
end)

check.test("checkpoint: the same bits as without, also through captured tensors", function()
  local function run(checkpoint)
    rille.manual_seed(2)
    local w = core.param("w", {6, 6}):normal_(0, 0.5)
    local a, b = leaf(rille.randn(5, 6)), leaf(rille.randn(5, 6))
    local captured = (b * 2):tanh()
    local function f(x, scale)
      local y = x:matmul(w):tanh() + captured
      y = rille.dropout(y, 0.25)
      return y:matmul(w * 0.5) * scale, y
    end
    local y, z
    if checkpoint then y, z = rille.checkpoint(f, a * 1.5, 3) else y, z = f(a * 1.5, 3) end
    local y2 = checkpoint and rille.checkpoint(f, y, 0.5) or f(y, 0.5)
    local loss = (y2 * z):sum() + captured:sum() + y:square():sum()
    loss:backward()
    return {loss:item(), a:grad():tolist(), b:grad():tolist(), w:grad():tolist()}
  end
  check.equal(run(true), run(false))
end)

check.test("a write to a parameter is found at backward, by whatever name it was kept or written",
  function()
    local nn = rille.nn
    local reads = {
      itself = function(p) return (p * p):sum() end,
      view = function(p) local v = p:view(6) return (v * v):sum() end,
      transposed = function(p) return (p:t() * p:t()):sum() end,
      checkpointed = function(p)
        return rille.checkpoint(function(v) return (v * v):sum() end, p:view(3, 2))
      end,
    }
    local writes = {
      fill = function(p) p:fill_(9) end,
      add = function(p) p:add_(1) end,
      draw = function(p) p:normal_() end,
      element = function(p) p[0] = 9 end,
      view = function(p) p:view(-1):fill_(9) end,
      detached = function(p) p:detach():fill_(9) end,
    }
    for read_name, read in pairs(reads) do
      for write_name, write in pairs(writes) do
        for _, gathered in ipairs { true, false } do
          local m = nn.Linear { 3, 2 }
          if gathered then rille.optim.new(m:named_parameters(), "sgd") end
          local y = read(m.weight)
          rille.no_grad(write, m.weight)
          local noticed = not pcall(y.backward, y)
          if not noticed then error(("%s, %s is missed"):format(read_name, write_name)) end
          y = read(m.weight)
          rille.no_grad(write, m.bias) -- a neighbour in the same array
          y:backward()
        end
      end
    end
  end)

check.test("a second forward that gives another shape, dtype or kind is named", function()
  local calls = 0
  local function region(second)
    calls = 0
    local x = rille.ones(2, 3):requires_grad_()
    local y = rille.checkpoint(function(h)
      calls = calls + 1
      return calls == 1 and h * 2 or second(h)
    end, x)
    y:sum():backward()
  end
  region(function(h) return h * 2 end)
  check.raises(function() region(function(h) return (h * 2):sum(0) end) end,
    "checkpoint: result 1 of the second forward is f32%[3%], the first forward gave f32%[2, 3%]",
    "compute the same both times")
  check.raises(function() region(function(h) return (h * 2):to("f64") end) end,
    "second forward is f64%[2, 3%], the first forward gave f32%[2, 3%]")
  check.raises(function() region(function() return nil end) end,
    "second forward is a nil, the first forward gave f32%[2, 3%]")
end)

check.test("checkpoint: nested regions, and I with W, give the same bits", function()
  local function run(checkpoint, half)
    rille.manual_seed(2)
    local w = core.param("w", {6, 6}):normal_(0, 0.5)
    local x = core.data(rille.randn(5, 6))
    local call = checkpoint and rille.checkpoint or function(f, ...) return f(...) end
    local function inner(h) return rille.dropout((h:matmul(w)):tanh(), 0.1) end
    local function outer(h) return call(inner, call(inner, h) * 0.5) + h end
    local y = call(outer, call(outer, x)):square():sum()
    local rest = core.backward({y}, nil, half)
    if rest then rest:run() end
    return w:grad():tolist()
  end
  local want = run(false, "B")
  check.equal(run(true, "B"), want)
  check.equal(run(true, "I"), want)
end)

check.test("checkpoint: gradients of a parameter add up in the order of a run without", function()
  local function run(checkpoint)
    rille.manual_seed(4)
    local w = core.param("w", {6, 6}):normal_(0, 1)
    local y = core.data(rille.randn(5, 6))
    local function f(h) return h:matmul(w:square():tanh()):tanh() end
    for _ = 1, 5 do y = checkpoint and rille.checkpoint(f, y) or f(y) end
    y:sum():backward()
    return w:grad():tolist()
  end
  check.equal(run(true), run(false))
end)

check.test("checkpoint: inside a scope nothing but what it reads is kept", function()
  local w = core.param("w", {64, 64}):normal_(0, 0.1)
  local x = core.data(rille.randn(32, 64))
  local function block(h)
    for _ = 1, 10 do h = h:matmul(w):tanh() end
    return h
  end
  local function live(fn)
    collectgarbage()
    local before = core.memory().activations.current
    local y = core.scope(fn, x)
    local kept = core.memory().activations.current - before
    y:sum():backward()
    return kept, w:grad():clone():tolist()
  end
  local plain, want = live(block)
  w:zero_grad()
  local small, got = live(function(h) return rille.checkpoint(block, h) end)
  check.equal(got, want)
  check.ok(small <= 2 * 32 * 64 * 4, small)
  check.ok(plain >= 10 * 32 * 64 * 4, plain)
end)

check.test("checkpoint: mistakes are named", function()
  local a = leaf{1.0, 2.0}
  local h = a * 2
  h = rille.checkpoint(function() return h * 3 end)
  check.raises(function() h:sum():backward() end, "second forward reads a tensor", "as an argument")
  check.raises(function() rille.checkpoint(function() return {a * 2} end) end, "not in tables")
  check.raises(function() rille.checkpoint(function() error("oops") end) end,
    "grad_test.lua:%d+: oops")
  check.ok(rille.is_grad_enabled())
  local n = 0
  local y = rille.checkpoint(function(x)
    n = n + 1
    if n > 1 then error("second") end
    return x * 2
  end, a)
  check.raises(function() y:sum():backward() end, "grad_test.lua:%d+: second")
  local b = rille.ones(2)
  y = rille.checkpoint(function(x) return x * b end, a)
  b:fill_(3)
  check.raises(function() y:sum():backward() end, "was changed since", "grad_test.lua")
end)

check.test("rille.op: a backward of one's own, used like a function", function()
  local cube = rille.op{
    name = "cube",
    forward = function(c, x, k)
      c:save(x)
      c.k = k
      return x * x * x * k
    end,
    backward = function(c, dy)
      local x = c:saved()
      return dy * 3 * c.k * x * x
    end,
  }
  local x = leaf{1.0, -2.0}
  local y = cube(x, 2)
  check.equal(y, {2.0, -16.0})
  y:sum():backward()
  check.equal(x:grad(), {6.0, 24.0})
  check.ok(rille.gradcheck(function(v) return cube(v, 2) end, {rille.randn(3)}))
  check.ok(not rille.no_grad(cube, x, 1):requires_grad())
end)

check.test("rille.op: wrong shapes, changed tensors and unknown options are named", function()
  local bad = rille.op{name = "bad", forward = function(_, x) return x * 1 end,
    backward = function(_, dy) return dy:sum() end}
  check.raises(function() bad(leaf{1.0, 2.0}):sum():backward() end, "bad: the gradient of input 0",
    "%[2%]")
  check.raises(function() rille.op{name = "a", foward = print} end, "did you mean \"forward\"")
  check.raises(function() rille.op{name = "a"} end, "must be functions")
  local double = rille.op{name = "double", forward = function(c, x) c:save(x) return x * 2 end,
    backward = function(c, dy) return dy * 2 + c:saved() * 0 end}
  local x = leaf{1.0}
  local h = rille.no_grad(function() return x * 1 end):requires_grad_()
  local y = double(h)
  rille.no_grad(function() h:fill_(5) end)
  check.raises(function() y:backward() end, "double: the saved tensor", "grad_test.lua:%d+")
end)

check.test("gradcheck finds a wrong gradient and names the worst element", function()
  local wrong = rille.op{name = "wrong", forward = function(_, x) return x * x end,
    backward = function(_, dy) return dy * 2 end}
  check.raises(function() rille.gradcheck(wrong, {tensor{{1.0, 2.0}, {3.0, 1.0}}}) end,
    "input 0 %[1, 0%]", "finite difference")
  local passed = rille.gradcheck(wrong, {tensor{3.0}}, {raise = false})
  check.equal(passed, false)
  check.ok(rille.gradcheck(function(a, b) return a:matmul(b):tanh() end,
    {rille.randn(2, 3), rille.randn(3, 2)}))
end)

check.done()
