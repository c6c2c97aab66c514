-- pairwise - a small set of cases in which every two values of every two dimensions meet.
--
--     local cases, pairs, of = pairwise { dimensions = { { name = "pp", 1, 2 }, ... },
--                                         is_valid = function(case) ... end, seed = 1 }
--
-- Greedy: each case begins with a pair that has not been seen, and of some random completions the
-- one with the most new pairs is taken. The same cases everywhere and always, by the seed.

-- A generator of its own: math.random belongs to the script.
local function random_of(seed)
  local state = seed
  return function(n) -- 1 .. n
    state = (state * 6364136223846793005 + 1442695040888963407) & 0x7fffffffffffffff
    return (state >> 33) % n + 1
  end
end

local TRIES <const>, COMPLETIONS <const> = 400, 24

-- A random valid case that has the given values; nil if none is found.
local function complete(o, given, random)
  for _ = 1, TRIES do
    local case = {}
    for _, dimension in ipairs(o.dimensions) do
      local value = given[dimension.name]
      if value == nil then value = dimension[random(#dimension)] end
      case[dimension.name] = value
    end
    if o.is_valid(case) then return case end
  end
end

local function key_of(a, x, b, y) return ("%s=%s %s=%s"):format(a, x, b, y) end

-- fn(key) for every pair of a case.
local function each_pair(o, case, fn)
  for i, a in ipairs(o.dimensions) do
    for j = i + 1, #o.dimensions do
      local b = o.dimensions[j]
      fn(key_of(a.name, case[a.name], b.name, case[b.name]))
    end
  end
end

-- All pairs that a valid case has, in order: {key, given}.
local function all_pairs(o, random)
  local list = {}
  for i, a in ipairs(o.dimensions) do
    for j = i + 1, #o.dimensions do
      local b = o.dimensions[j]
      for _, x in ipairs(a) do
        for _, y in ipairs(b) do
          local given = { [a.name] = x, [b.name] = y }
          if complete(o, given, random) then
            table.insert(list, { key = key_of(a.name, x, b.name, y), given = given })
          end
        end
      end
    end
  end
  return list
end

--- The cases, how many pairs they cover, and how many pairs there are.
---@return table[] cases, integer covered, integer pairs
return function(o)
  local random, seen, cases, covered = random_of(o.seed), {}, {}, 0
  local pairs_ = all_pairs(o, random)
  for _, pair in ipairs(pairs_) do
    local best, most
    for _ = 1, seen[pair.key] and 0 or COMPLETIONS do
      local case, new = complete(o, pair.given, random), 0
      if case then
        each_pair(o, case, function(key) if not seen[key] then new = new + 1 end end)
        if not best or new > most then best, most = case, new end
      end
    end
    if best then
      each_pair(o, best, function(key) seen[key] = true end)
      table.insert(cases, best)
    end
  end
  for _, pair in ipairs(pairs_) do covered = covered + (seen[pair.key] and 1 or 0) end
  return cases, covered, #pairs_
end
