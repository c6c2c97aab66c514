local check <const> = require "tests.check"
local rille <const> = require "rille"
local tensor <const> = rille.tensor

local x <const> = rille.arange(24):to("f32"):reshape(2, 3, 4)

check.test("split: views of the parts, by one size or by sizes, with gradients", function()
  local v = rille.arange(7)
  local a, b, c = v:split(3)
  check.equal({ a:tolist(), b:tolist(), c:tolist() }, { { 0, 1, 2 }, { 3, 4, 5 }, { 6 } })
  local y = rille.arange(12):view(2, 6)
  local d, e, f = y:split({ 1, 0, 5 }, -1)
  check.equal({ d:tolist(), { e:shape() }, f:tolist() },
    { { { 0 }, { 6 } }, { 2, 0 }, { { 1, 2, 3, 4, 5 }, { 7, 8, 9, 10, 11 } } })
  check.equal(select("#", rille.zeros(0, 2):split(2)), 0)
  rille.gradcheck(function(t)
    local left, middle, right = t:split({ 2, 1, 2 }, 1)
    return left * 2 + right, middle:exp()
  end, { rille.randn(3, 5) })
  rille.gradcheck(function(t) -- of a view that is not contiguous
    local up, down = t:t():split(3, 0)
    return up * up, down
  end, { rille.randn(2, 5) })
  a[0] = 9
  check.equal(v[0]:item(), 9)
  check.raises(function() y:split({ 1, 2 }, 1) end,
    "split: the sizes make 3, the dimension has 6", "i64%[2, 6%]")
  check.raises(function() y:split(0) end, "at least 1")
  check.raises(function() y:split({ -1, 3 }, 0) end, "from 0 to 2, got %-1")
  check.raises(function() y:split(1, 2) end, "split: there is no dimension 2, valid are %-2 to 1")
  check.raises(function() y:split() end, "split: the size of a part must be an integer")
end)

check.test("integers take an entry, from the end if negative", function()
  check.equal(x[0][1], {4.0, 5.0, 6.0, 7.0})
  check.equal(x[-1][-1][-1]:item(), 23.0)
  check.equal({x[1]:shape()}, {3, 4})
end)

check.test("strings: ranges are half-open, with steps, and dots skip dimensions", function()
  check.equal(x["0:2, :, -1"], {{3.0, 7.0, 11.0}, {15.0, 19.0, 23.0}})
  check.equal(x["1"], x[1]:tolist())
  check.equal(x["0, ::2"], {{0.0, 1.0, 2.0, 3.0}, {8.0, 9.0, 10.0, 11.0}})
  check.equal(x["..., 0"], {{0.0, 4.0, 8.0}, {12.0, 16.0, 20.0}})
  check.equal(x["0, ..., 1:3"], {{1.0, 2.0}, {5.0, 6.0}, {9.0, 10.0}})
  check.equal(x["0,0,-2:"], {2.0, 3.0})
  check.equal(x["0,0,:-3"], {0.0})
  check.equal({x["1:1"]:shape()}, {0, 3, 4})
  check.equal({x["0:99"]:shape()}, {2, 3, 4})
end)

check.test("tables: {start, stop, step}, {} for all, integers", function()
  check.equal(x[{{0, 2}, {}, -1}], {{3.0, 7.0, 11.0}, {15.0, 19.0, 23.0}})
  check.equal(x[{0, {0, 3, 2}, {1, 2}}], {{1.0}, {9.0}})
  check.equal(x[{1, "1:", 0}], {16.0, 20.0})
end)

check.test("tensors: ids pick entries, masks keep entries", function()
  check.equal(tensor{10, 20, 30}[tensor{2, 0, -1}], {30, 10, 30})
  check.equal({x[tensor{{0, 1}, {1, 0}}]:shape()}, {2, 2, 3, 4})
  check.equal(x[{0, tensor{2, 0}, 1}], {9.0, 1.0})
  local y = tensor{{1.0, -2.0}, {-3.0, 4.0}}
  check.equal(y[y:lt(0)], {-2.0, -3.0})
  check.equal(y[tensor{false, true}], {{-3.0, 4.0}})
  check.equal({y[tensor{false, false}]:shape()}, {0, 2})
end)

check.test("gradients flow through indexing", function()
  local w = rille.zeros({2, 3}, {requires_grad = true})
  local y = w[0]:sum() + w["1, 1:"]:sum() * 2 + w[tensor{1, 1}]:sum() + w[w:lt(1)]:sum()
  y:backward()
  check.equal(w:grad(), {{2.0, 2.0, 2.0}, {3.0, 5.0, 5.0}})
end)

check.test("assignment writes views, broadcasts and converts", function()
  local y = rille.zeros(2, 3)
  y[0] = 1
  y["1, 1:"] = tensor{5, 6}
  check.equal(y, {{1.0, 1.0, 1.0}, {0.0, 5.0, 6.0}})
  y[{{}, 0}] = tensor{7.0, 8.0}
  check.equal(y, {{7.0, 1.0, 1.0}, {8.0, 5.0, 6.0}})
  y["0:2"] = tensor{1.0, 2.0, 3.0}
  check.equal(y, {{1.0, 2.0, 3.0}, {1.0, 2.0, 3.0}})
  y[y:eq(2)] = -1
  check.equal(y, {{1.0, -1.0, 3.0}, {1.0, -1.0, 3.0}})
  y[tensor{true, false}] = tensor{9.0, 9.0, 8.0}
  check.equal(y, {{9.0, 9.0, 8.0}, {1.0, -1.0, 3.0}})
  y[tensor{1, 0}] = tensor{{1.0, 1.0, 1.0}, {2.0, 2.0, 2.0}}
  check.equal(y, {{2.0, 2.0, 2.0}, {1.0, 1.0, 1.0}})
  y[tensor{-1}] = 4
  check.equal(y[1], {4.0, 4.0, 4.0})
  local z = rille.arange(6)
  z["1:"] = z["0:5"] -- source and target overlap
  check.equal(z, {0, 0, 1, 2, 3, 4})
  local t = y:t()
  t[0] = 0
  check.equal(y, {{0.0, 2.0, 2.0}, {0.0, 4.0, 4.0}})
end)

check.test("mistakes are named, and say that counting starts at 0", function()
  check.raises(function() return x[2] end, "index 2 is out of range for dimension 0",
    "valid are %-2 to 1", "counting starts at 0", "f32%[2, 3, 4%]")
  check.raises(function() return x["0, 3"] end, "dimension 1, valid are %-3 to 2")
  check.raises(function() return x["0,0,0,0"] end, "more entries than dimensions")
  check.raises(function() return x["::-1"] end, "step must be positive", "flip")
  check.raises(function() return x["1:2:3:4"] end, "not understood")
  check.raises(function() return x[1.5] end, "no integer")
  check.raises(function() return x[{true}] end, "got boolean")
  check.raises(function() return x[tensor{0.5}] end, "got f32")
  check.raises(function() return tensor{1, 2}[tensor{3}] end, "index_select", "0 to 1")
  check.raises(function() return x[tensor{true}] end, "mask bool%[1%]")
  check.raises(function() return x:rellu() end, "no method \"rellu\"", "\"relu\"")
  check.raises(function() x.foo = 1 end, "no field \"foo\"")
  check.raises(function() x[5] = 1 end, "counting starts at 0")
  check.raises(function() x[0] = tensor{1, 2} end, "does not fit")
  check.raises(function() x[0] = "a" end, "tensor or a number")
  local w = rille.ones(2, {requires_grad = true})
  check.raises(function() w[0] = 2 end, "would lose a gradient", "no_grad")
  local y = rille.zeros(2)
  check.raises(function() y[0] = w[0] end, "would lose a gradient")
  rille.no_grad(function() w[0] = 2 end)
  check.equal(w, {2.0, 1.0})
end)

check.test("a write to what backward needs is found, naming both lines", function()
  local w = rille.ones(2, {requires_grad = true})
  local y = rille.ones(2)
  local z = (w * y):sum()
  y[0] = 3
  check.raises(function() z:backward() end, "mul at tests/index_test.lua:%d+",
    "changed at tests/index_test.lua:%d+")
end)

check.test("a view of a parameter writes to the parameter", function()
  local w = rille.core.param("w", {2, 2}):fill_(0)
  rille.no_grad(function() w[0] = 3 end)
  check.equal(w, {{3.0, 3.0}, {0.0, 0.0}})
end)

check.done()
