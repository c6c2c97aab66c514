local check <const> = require "tests.check"
local rille <const> = require "rille"
local tensor <const> = rille.tensor

check.test("tensor: shape and dtype follow the nested tables", function()
  local x = tensor{{1, 2.5, 3}, {4, 5, 6}}
  check.equal({x:shape()}, {2, 3})
  check.equal({x:dtype(), x:ndim(), x:numel(), x:size(-1), #x}, {"f32", 2, 6, 3, 2})
  check.equal(x:tolist(), {{1.0, 2.5, 3.0}, {4.0, 5.0, 6.0}})
  check.equal({tensor{1, 2}:dtype(), tensor{true}:dtype(), tensor("ab"):dtype()},
    {"i64", "bool", "u8"})
  check.equal(tensor("ab"):tolist(), {97, 98})
  check.equal(tensor(2.5):item(), 2.5)
  check.equal(tensor({1, 2}, {dtype = "f64"}):dtype(), "f64")
end)

check.test("i64 is exact beyond 2^53: made, filled, assigned, counted, shown", function()
  local big <const> = (1 << 53) + 1
  check.equal(tensor{big, -big}:tolist(), {big, -big})
  check.equal(rille.full({2}, big), {big, big})
  check.equal(rille.full_like(tensor{1}, big), {big})
  check.equal(rille.zeros({2}, {dtype = "i64"}):fill_(big), {big, big})
  local x <const> = tensor{1, 2}
  x[0] = big
  check.equal(x, {big, 2})
  check.equal(rille.arange(big, big + 3), {big, big + 1, big + 2})
  check.equal(rille.arange(big, big - 5, -2), {big, big - 2, big - 4})
  check.ok(tostring(tensor{big, 1}):find("[9007199254740993,                1]", 1, true))
  check.ok(tostring(tensor(math.mininteger)):find("-9223372036854775808", 1, true))
end)

check.test("real numbers become integers by one rule, wherever it happens", function()
  local reals <const> = {2.9, -2.9, 0 / 0, 1 / 0, -1 / 0, 1e300, -1e19}
  local most <const>, least <const> = math.maxinteger, math.mininteger
  local integers <const> = {2, -2, 0, most, least, most, least}
  check.equal(tensor(reals, {dtype = "i64"}), integers)
  for _, dtype in ipairs{"f64", "f32"} do
    check.equal(tensor(reals, {dtype = dtype}):to("i64"), integers)
  end
  local low <const> = {2, -2, 0, -1, 0, -1, 0} -- the low bits of these
  check.equal(tensor(reals, {dtype = "i32"}), low)
  check.equal(tensor(reals, {dtype = "f64"}):to("i32"), low)
  for i, real in ipairs(reals) do
    check.equal(rille.full({1}, real, {dtype = "i64"}), {integers[i]})
    check.equal(rille.full({1}, real, {dtype = "i32"}), {low[i]})
    local x <const> = tensor{7}
    x[0] = real
    check.equal(x, {integers[i]})
  end
end)

check.test("tensor: ragged tables and foreign values are refused", function()
  check.raises(function() tensor{{1, 2}, {3}} end, "has 1 entries, the first one there has 2")
  check.raises(function() tensor{1, {2}} end, "where a number is expected")
  check.raises(function() tensor{{1}, 2} end, "where a table is expected")
  check.raises(function() tensor{"a"} end, "found a string")
  check.raises(function() tensor({1}, {dtypo = "f32"}) end, "no option \"dtypo\"", "\"dtype\"")
end)

check.test("arithmetic: broadcasting, and numbers of the other operand's dtype", function()
  local x = tensor{{1.0, 2.0}, {3.0, 4.0}}
  check.equal(x + tensor{10.0, 20.0}, {{11.0, 22.0}, {13.0, 24.0}})
  check.equal(2 * x - 1, {{1.0, 3.0}, {5.0, 7.0}})
  check.equal(-x / 2, {{-0.5, -1.0}, {-1.5, -2.0}})
  check.equal(x ^ 2, {{1.0, 4.0}, {9.0, 16.0}})
  check.equal({(tensor{1, 2} + 1):dtype(), (tensor{1, 2} + 0.5):dtype()}, {"i64", "f32"})
  check.equal((x:to("f64") + 0.1):dtype(), "f64")
  check.equal(tensor{1 << 60} + 1, {(1 << 60) + 1})
end)

check.test("arguments: positional, a table of options, numbers as a list", function()
  local x = tensor{{1.0, 2.0}, {3.0, 4.0}}
  check.equal(x:sum():item(), 10.0)
  check.equal(x:sum(0), {4.0, 6.0})
  check.equal(x:sum(0, 1):item(), 10.0)
  check.equal(x:sum({0}, true), {{4.0, 6.0}})
  check.equal(x:sum{0, keepdim = true}, {{4.0, 6.0}})
  check.equal(x:sum{0, 1}:item(), 10.0)
  check.equal(rille.sum(x, {dims = {1}}), {3.0, 7.0})
  check.equal(x:clamp{hi = 2.5}, {{1.0, 2.0}, {2.5, 2.5}})
  check.raises(function() x:sum{keepdims = true} end, "no option \"keepdims\"", "\"keepdim\"%?")
  check.raises(function() x:sum{0, dims = {1}} end, "given twice")
  check.raises(function() x:clamp(1, 2, 3) end, "too many arguments")
  check.raises(function() x:clamp("a") end, "lo must be a number, got string")
  check.raises(function() rille.relu("a") end, "x must be a tensor or a number, got string")
end)

check.test("list arguments: numbers in a row, tables, lists of tensors", function()
  local x = rille.arange(6)
  check.equal(x:view(2, 3), {{0, 1, 2}, {3, 4, 5}})
  check.equal(x:view{3, -1}, {{0, 1}, {2, 3}, {4, 5}})
  check.equal({x:view(1, 2, 3):permute(2, 0, 1):shape()}, {3, 1, 2})
  check.equal(rille.cat({x, x}, 0):numel(), 12)
  local y = x:view(2, 3)
  check.equal({rille.cat({y, y}, {dim = 1}):shape()}, {2, 6})
  check.equal({rille.cat{y, y, dim = -1}:shape()}, {2, 6})
  check.equal({y:cat(y, 1):shape()}, {2, 6})
  check.equal({rille.stack{x, x, x}:shape()}, {3, 6})
  check.raises(function() rille.cat{y, 3} end, "entry 2 must be a tensor, got number")
  check.raises(function() rille.cat{y, dimm = 1} end, "no option \"dimm\"")
  check.raises(function() rille.cat(3) end, "a table of tensors")
  check.raises(function() y:view(4, 4) end, "6 elements do not fit %[4, 4%]")
  check.raises(function() y:view("a") end, "table of integers, got string")
  check.raises(function() y:view(1.5) end, "list of integers")
  local values, positions = tensor{3.0, 1.0, 2.0}:topk(2)
  check.equal({values:tolist(), positions:tolist()}, {{3.0, 2.0}, {0, 2}})
  check.equal(y:pad{1, 0, value = 9}, {{9, 0, 1, 2}, {9, 3, 4, 5}})
end)

check.test("errors name what, the shapes, the script's line and a hint", function()
  local x = rille.ones(2, 3)
  check.raises(function() x:matmul(x) end, "^tests/tensor_test.lua:%d+: matmul: inner sizes differ",
    "f32%[2, 3%], b is f32%[2, 3%]", "\n    hint: ")
  check.raises(function() return x + rille.ones(4) end, "f32%[2, 3%]", "f32%[4%]")
end)

check.test("comparisons by operator are refused", function()
  local x = rille.ones(2)
  check.raises(function() return x < x end, "use a:lt%(b%)")
  check.raises(function() return x <= x end, "use a:le%(b%)")
  check.raises(function() return x == rille.ones(2) end, "use a:eq%(b%)")
end)

check.test("in place: name_ writes, and refuses to lose a gradient", function()
  local x = tensor{-1.0, 2.0}
  check.equal(x:relu_(), {0.0, 2.0})
  x:add_(1)
  check.equal(x, {1.0, 3.0})
  local w = rille.ones(2, {requires_grad = true})
  check.raises(function() w:add_(1) end, "would lose a gradient")
  check.raises(function() w:fill_(1) end, "would lose a gradient")
end)

check.test("backward: gradients of leaves add up and are forgotten by zero_grad", function()
  local w = tensor({1.0, 2.0}, {requires_grad = true})
  w:square():sum():backward()
  check.equal(w:grad(), {2.0, 4.0})
  w:sum():backward()
  check.equal(w:grad(), {3.0, 5.0})
  w:zero_grad()
  check.equal(w:grad(), nil)
  local y = w * 3
  y:backward(tensor{1.0, 10.0})
  check.equal(w:grad(), {3.0, 30.0})
  check.raises(function() (w * 2):backward() end, "not a single number", "pass the gradient")
  check.raises(function() rille.ones(1):backward() end, "nothing that wants a gradient")
end)

check.test("makers: ranges, fills, eye, options", function()
  check.equal(rille.arange(3), {0, 1, 2})
  check.equal(rille.arange(1, 2, 0.5), {1.0, 1.5})
  check.equal(rille.arange(3, 0, -1), {3, 2, 1})
  check.equal(rille.linspace(0, 1, 3), {0.0, 0.5, 1.0})
  check.equal(rille.full({2}, 0.5), {0.5, 0.5})
  check.equal(rille.eye(2, 3), {{1.0, 0.0, 0.0}, {0.0, 1.0, 0.0}})
  check.equal(rille.zeros({1, 2}, {dtype = "i32"}), {{0, 0}})
  check.equal(rille.ones_like(tensor{1, 2}), {1, 1})
  check.equal(rille.full_like(tensor{1.0}, 7), {7.0})
  local m = rille.zeros(1 << 20, 1 << 20, {device = "meta"})
  check.equal({m:device(), m:shape()}, {"meta", 1 << 20, 1 << 20})
  check.raises(function() m:item() end, "one element")
  check.raises(function() m:tolist() end, "meta device")
  check.raises(function() rille.zeros(-1) end, "must not be negative")
  check.raises(function() rille.zeros(2, {device = "gpu"}) end, "no device \"gpu\"")
end)

check.test("random draws follow the seed, and their state can be brought back", function()
  rille.manual_seed(3)
  local a, b = rille.randn(5), rille.randn(5)
  rille.manual_seed(3)
  check.equal(rille.randn(5), a:tolist())
  local state = rille.random_state()
  check.equal(rille.randn(5), b:tolist())
  rille.random_state(state)
  check.equal(rille.randn(5), b:tolist())
  check.ok(a:sub(b):abs():sum():item() > 0.1)
  for _, i in ipairs(rille.randint(2, 5, 200):tolist()) do check.ok(i >= 2 and i < 5) end
  local u = rille.rand(1000)
  check.near(u:mean():item(), 0.5, 0.05)
end)

check.test("printing: values in columns, large tensors short", function()
  check.equal(tostring(tensor{{1.0, -2.5}}), "f32[1, 2]\n  [[ 1.0000, -2.5000]]")
  check.equal(tostring(tensor(3)), "i64[]\n  3")
  local words = tostring(rille.randn(1000, 1000))
  check.ok(#words < 1000 and words:find("%.%.%."), words)
  check.equal(tostring(rille.zeros(0)), "f32[0]")
end)

check.done()
