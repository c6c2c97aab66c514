-- is_finite - whether a number is neither NaN nor an infinity.

---@param x number
---@return boolean
return function(x) return x - x == 0 end
