--- gradcheck - gradients against central differences, in f64.
local rille <const> = require "rille"
local expect <const> = require "rille.expect"
local fail <const> = require "rille.fail"
local known <const> = require "rille.known"

local M <const> = {}

--- A weighted sum of what fn returns, so that every output element counts, each differently.
local function objective(outputs, weights)
  local total
  for i, y in ipairs(outputs) do
    if rille.is_tensor(y) and y:dtype() == "f64" then
      weights[i] = weights[i] or rille.rand_like(y:detach()) + 0.5
      local term = (y * weights[i]):sum()
      total = total and total + term or term
    end
  end
  if not total then fail("gradcheck: fn returned no f64 tensor") end
  return total
end

--- "[2, 0]" from a row-major position.
local function place(x, flat)
  local shape, at = {x:shape()}, {}
  for d = #shape, 1, -1 do
    at[d] = flat % shape[d]
    flat = flat // shape[d]
  end
  return "[" .. table.concat(at, ", ") .. "]"
end

--- The elements of nested tables, row-major.
local function flatten(nested, out)
  if type(nested) ~= "table" then
    out[#out + 1] = nested
    return out
  end
  for _, entry in ipairs(nested) do flatten(entry, out) end
  return out
end

--- Calls visit(k) with element k of x moved by `by`, and moves it back.
local function moved(x, nested, k, by, visit)
  local shape, row = {x:shape()}, {[1] = nested}
  if #shape == 0 then
    x:detach():fill_(nested + by)
    local value = visit()
    x:detach():fill_(nested)
    return value
  end
  local at = {}
  for d = #shape, 1, -1 do
    at[d] = k % shape[d] + 1
    k = k // shape[d]
  end
  for d = 1, #shape - 1 do row[d + 1] = row[d][at[d]] end
  local last, i = row[#shape], at[#shape]
  local before = last[i]
  last[i] = before + by
  x:detach():copy_(rille.tensor(nested, {dtype = "f64"}))
  local value = visit()
  last[i] = before
  x:detach():copy_(rille.tensor(nested, {dtype = "f64"}))
  return value
end

--- Compares the gradients of fn(table.unpack(inputs)) with central differences. Floating point
--- inputs are copied to f64 and differentiated, others passed on. Raises an error that names the
--- worst element if |analytic - numeric| > tol (1 + |numeric|) anywhere.
---@param fn fun(...): any
---@param inputs table
---@param options? {eps: number?, tol: number?, raise: boolean?}
---@return boolean passed, string report
function M.gradcheck(fn, inputs, options)
  options = options or {}
  expect("gradcheck", "fn", fn, "function")
  if rille.is_tensor(inputs) then inputs = { inputs } end
  expect("gradcheck", "inputs", inputs, "list")
  known("gradcheck", options, { "eps", "tol", "raise" })
  expect("gradcheck", "eps", options.eps, "number?")
  expect("gradcheck", "tol", options.tol, "number?")
  local eps <const>, tol <const> = options.eps or 1e-5, options.tol or 1e-6
  local copies, weights = {}, {}
  for i, x in ipairs(inputs) do
    local float = rille.is_tensor(x) and (x:dtype() == "f32" or x:dtype() == "f64")
    copies[i] = float and x:detach():to("f64"):clone():requires_grad_() or x
  end
  local state <const> = rille.random_state()
  local function value()
    rille.random_state(state)
    return objective({fn(table.unpack(copies))}, weights)
  end
  value():backward()
  local worst, words, count = -1, "nothing to compare", 0
  for i, x in ipairs(copies) do
    if rille.is_tensor(x) and x:requires_grad() then
      local grad = x:grad() and flatten(x:grad():tolist(), {})
      rille.no_grad(function()
        local nested = x:tolist()
        local function measure() return value():item() end
        for k = 0, x:numel() - 1 do
          local above = moved(x, nested, k, eps, measure)
          local below = moved(x, nested, k, -eps, measure)
          local numeric, analytic = (above - below) / (2 * eps), grad and grad[k + 1] or 0.0
          local off = math.abs(analytic - numeric) / (1 + math.abs(numeric))
          if off ~= off then off = math.huge end
          count = count + 1
          if off > worst then
            worst = off
            words = ("input %d %s: gradient %.10g, finite difference %.10g"):format(i - 1,
              place(x, k), analytic, numeric)
          end
        end
      end)
    end
  end
  local passed <const> = worst <= tol
  local report <const> = ("gradcheck: %d elements, worst difference %.3g (tolerance %g) at %s")
    :format(count, worst, tol, words)
  if not passed and options.raise ~= false then fail("%s", report) end
  return passed, report
end

return M
